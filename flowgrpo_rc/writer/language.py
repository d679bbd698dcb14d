"""The writer's language model and its tokenizer."""

import copy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.lora import attach_lora, linear_layers
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.quiet import quiet_loading
from flowgrpo_rc.writer.config import PromptWriterConfig

PATH = "algorithm.prompt_writer.path"


class LanguageModel:
    """A causal language model, frozen, with the tokenizer of its folder.

    Raises:
        ValueError: the folder holds no causal language model, or its tokenizer has no chat template.
    """

    def __init__(self, config: PromptWriterConfig, device: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(resolve_asset(config.path or ""))
        if not (folder / "config.json").is_file():
            raise ValueError(f"{PATH}: {folder} has no config.json; give the folder of a language model")
        self.config = config
        self.device = torch.device(device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{PATH}: the tokenizer in {folder} has no chat template, through which requests go; give a model "
                "that was trained on chats, or add its chat_template.jinja"
            )
        with quiet_loading("transformers"):
            self.network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(config.dtype))
        self.network.requires_grad_(False).eval().to(self.device)
        ends = self.network.generation_config.eos_token_id
        if ends is None:
            ends = self.tokenizer.eos_token_id
        self.ends: list[int] = [ends] if isinstance(ends, int) else list(ends or ())
        """Tokens that end a rewrite."""
        if not self.ends:
            raise ValueError(f"{PATH}: neither the model in {folder} nor its tokenizer names a token that ends a text")
        self.pad: int = self.ends[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id

    @property
    def default_lora_targets(self) -> list[str]:
        """Last parts of the names of all linear layers but the output layer."""
        output = self.network.get_output_embeddings()
        layers = linear_layers(self.network).items()
        return sorted({name.rpartition(".")[2] for name, layer in layers if layer is not output})

    def request_tokens(self, request: str) -> list[int]:
        """The tokens of a request, up to the place where the rewrite begins."""
        system = self.config.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": request})
        options = self.config.chat_template_kwargs
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)

    def text(self, tokens: list[int]) -> str:
        """The text of a rewrite, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def copy_of_base(self, dtype: torch.dtype) -> nn.Module:
        """A second network in ``dtype``; make it before an adapter is attached."""
        return copy.deepcopy(self.network).to(dtype)

    def attach(self, network: nn.Module, adapter: str, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        """Add the adapter of the configuration to ``network``; see ``attach_lora``."""
        attach_lora(
            network, self, self.config, dtype=dtype, compute_dtype=compute_dtype, device=self.device, adapter=adapter
        )


def token_log_probs(
    network: Any, input_ids: Int[Tensor, "B L"], request_lengths: Int[Tensor, " B"], length: int
) -> Float[Tensor, "B T"]:
    """Log-probs of the ``length`` tokens that follow each request, in nats, float32.

    Args:
        network: a causal language model.
        input_ids: request and rewrite of each row, padded at the end: earlier tokens do not attend to padding.
        request_lengths: number of the request's tokens.
        length: ``T``; beyond the end of a rewrite the values mean nothing, but are finite.
    """
    places = request_lengths[:, None] - 1 + torch.arange(length, device=input_ids.device)
    places = places.clamp(max=input_ids.shape[1] - 2)
    logits = network(input_ids=input_ids).logits
    chosen = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).float()
    tokens = input_ids.gather(1, places + 1)
    return chosen.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
