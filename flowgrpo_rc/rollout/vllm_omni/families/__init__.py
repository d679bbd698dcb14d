"""One module a family: its pipeline in vllm-omni, and differences from the trainer's. Each imports vllm-omni."""
