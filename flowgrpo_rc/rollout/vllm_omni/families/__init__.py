"""One module a family: its adapter around vllm-omni's transformer, and its pipeline. Each imports vllm-omni."""
