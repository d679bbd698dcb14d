"""One of two processes of a vllm-omni worker with tensor parallelism on the CPU: ``RANK PORT FOLDER``.

vllm-omni's own executor of several processes needs an accelerator; its worker, layers and adapters do not. The folder
has ``asked.pt``; the answer is ``held_RANK.pt``.
"""

import sys
from pathlib import Path

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.registry import register_diffusion_model
from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase

from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.sampling import RequestSampler
from flowgrpo_rc.rollout.vllm_omni.lora import held_by_all, lora_request
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES


def main(rank, port, folder):
    """Load, bind the adapter, read it back, sample, and then hold another one on one process alone."""
    torch.set_num_threads(1)
    asked = torch.load(folder / "asked.pt", weights_only=False)
    here = "flowgrpo_rc.rollout.vllm_omni"
    pipeline = asked["pipeline"]
    register_diffusion_model(pipeline, f"{here}.pipeline", "Rollout", pre_process_func_name="leave_as_they_are")
    config = OmniDiffusionConfig.from_kwargs(
        model=asked["model"],
        dtype="float32",
        parallel_config={"tensor_parallel_size": 2},
        num_gpus=2,
        master_port=port,
        enforce_eager=True,
        max_num_seqs=8,
        max_cpu_loras=2,
        custom_pipeline_args={"pipeline_class": PIPELINES[pipeline].rollout.replace(":", ".")},
        worker_extension_cls=f"{here}.lora.RolloutWorker",
    )
    config.enrich_config()
    config.master_port = port  # it looks for a free one of its own
    worker = WorkerWrapperBase(
        gpu_id=rank,
        od_config=config,
        worker_extension_cls=config.worker_extension_cls,
        custom_pipeline_args=config.custom_pipeline_args,
    ).worker
    worker.flowgrpo_prepare("float32", True)
    worker.add_lora(lora_request(1, asked["state"], asked["alpha"]))
    worker.flowgrpo_activate(lora_request(1))
    active, digest = worker.flowgrpo_held(asked["state"])
    rollout = worker.model_runner.pipeline
    sampler = RequestSampler(rollout.model, rollout.transformer, asked["request"], torch.device("cpu"))
    with set_forward_context(vllm_config=worker.vllm_config, omni_diffusion_config=config):
        images, record = sampler.sample(torch.arange(len(asked["request"].prompt_index)))
    layers = worker.lora_manager._lora_modules.values()
    divided = sum(layer.lora_b_stacked[0].shape[2] < layer.base_layer.output_size for layer in layers)
    kinds = {type(layer.base_layer).__name__ for layer in layers}
    faults = []
    for process in (0, 1):
        layer = next(iter(layers))
        if rank == process:
            layer.lora_b_stacked[0][0, 0, 0, 0] += 1
        try:
            faults.append(held_by_all(worker.lora_manager, asked["state"])[1])
        except AdapterMismatchError as error:
            faults.append(str(error))
        if rank == process:
            layer.lora_b_stacked[0][0, 0, 0, 0] -= 1
    answer = {"active": active, "digest": digest, "images": images, "record": record, "faults": faults}
    torch.save(answer | {"divided": divided, "kinds": kinds}, folder / f"held_{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
