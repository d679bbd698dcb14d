"""The writer's language model and its tokenizer."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from jinja2 import TemplateError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.messages import one_line
from flowgrpo_rc.models.lora import attach_lora, linear_layers
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.quiet import quiet_loading
from flowgrpo_rc.writer.config import PromptWriterConfig

PATH = "algorithm.prompt_writer.path"


class NonFiniteWriterError(RuntimeError):
    """A log-prob, loss or gradient of the prompt writer is not finite."""


class RequestTokens:
    """The tokenizer of the writer's folder, and the tokens that end a rewrite. Reads no weights.

    Raises:
        ValueError: the folder holds no language model, its tokenizer has no chat template, or nothing ends a rewrite.
    """

    def __init__(self, config: PromptWriterConfig) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        self.folder = resolve_asset(config.path or "")
        """Folder or hub name of the model."""
        self._config = config
        network = describe_network(self.folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        self._longest: int | None = getattr(network, "max_position_embeddings", None)
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{PATH}: the tokenizer in {self.folder} has no chat template, through which requests go; give a model "
                "that was trained on chats, or add its chat_template.jinja"
            )
        # The network's own comes last: its class may have a default that no file names.
        named: list[Any] = [self.tokenizer, network]
        with suppress(OSError):  # not every model has one
            named.insert(0, GenerationConfig.from_pretrained(self.folder))
        ends = next((one.eos_token_id for one in named if getattr(one, "eos_token_id", None) is not None), None)
        if ends is None:
            raise ValueError(
                f"{PATH}: neither the model in {self.folder} nor its tokenizer names a token that ends a text"
            )
        self.ends: list[int] = [ends] if isinstance(ends, int) else list(ends)
        """Tokens that end a rewrite."""
        self.pad: int = self.ends[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id

    def of(self, request: str) -> list[int]:
        """The tokens of a request, up to the place where the rewrite begins.

        Raises:
            ValueError: the chat template does not take it.
        """
        system = self._config.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": request})
        options = self._config.chat_template_kwargs
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"algorithm.prompt_writer: the chat template in {self.folder} does not take the request {request!r} "
                f"({one_line(error)}); see its system_prompt={system!r} and chat_template_kwargs={options}"
            ) from error

    def text(self, tokens: list[int]) -> str:
        """The prompt that a rewrite holds, without special tokens; empty if it lacks ``prompt_marker``."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if self._config.prompt_marker is not None:
            _, found, text = text.rpartition(self._config.prompt_marker)
            text = text if found else ""
        return text.strip()

    def check_requests(self, requests: Sequence[tuple[str, str]]) -> str | None:
        """Check requests, each given with its place in a file, before anything is loaded.

        Returns one line on those that the tokenizer does not give back as they are, or ``None``.

        Raises:
            ValueError: the chat template does not take one, or one is too long for the model; with its place.
        """
        changed: list[tuple[str, str, str]] = []
        for request, source in requests:
            try:
                tokens = len(self.of(request))
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from error
            if self._longest is not None and tokens + self._config.max_new_tokens > self._longest:
                raise ValueError(
                    f"{source}: with its chat template the request has {tokens} tokens; with "
                    f"algorithm.prompt_writer.max_new_tokens={self._config.max_new_tokens} these are more than the "
                    f"{self._longest} of the model in {self.folder}; shorten it, or lower max_new_tokens"
                )
            back = self.tokenizer.decode(self.tokenizer(request, add_special_tokens=False).input_ids)
            if back.strip() != request.strip():
                changed.append((source, request, back))
        if not changed:
            return None
        source, request, back = changed[0]
        return (
            f"{PATH}: the tokenizer in {self.folder} cannot write {len(changed)} of {len(requests)} requests as they "
            f"are (the first: {source}, {request[:80]!r} becomes {back[:80]!r}); rewrites lose the same"
        )


def describe_network(path: str) -> Any:
    """The configuration of the language model in a folder or on the hub; ``ValueError`` if there is none."""
    from transformers import AutoConfig

    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{PATH}: {path} has no config.json; give the folder of a language model")
    try:
        return AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(
            f"{PATH}: {path} cannot be read ({one_line(error, 200)}); give the folder of a language model in "
            "transformers' format, or its name on the hub"
        ) from error


class LanguageModel:
    """A causal language model, frozen, with the tokenizer of its folder; raises as ``RequestTokens``. ``dtype`` rounds
    it further than ``config.dtype`` does."""

    def __init__(self, config: PromptWriterConfig, device: Any, dtype: torch.dtype | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.config = config
        self.device = torch.device(device)
        self.tokens = RequestTokens(config)
        with quiet_loading("transformers"):
            network: Any = AutoModelForCausalLM.from_pretrained(self.tokens.folder, dtype=torch_dtype(config.dtype))
        if dtype is not None:
            self._round(network, dtype)
        self.network: Any = network.requires_grad_(False).eval().to(self.device)

    @property
    def default_lora_targets(self) -> list[str]:
        """Layers that get the adapter where ``target_modules`` is null."""
        return default_lora_targets(self.network)

    def copy_of_base(self, dtype: torch.dtype) -> nn.Module:
        """A second network in ``dtype``; make it before an adapter is attached."""
        network = copy.deepcopy(self.network)
        self._round(network, dtype)
        return network

    def _round(self, network: nn.Module, dtype: torch.dtype) -> None:
        held = torch_dtype(self.config.dtype)
        # Not buffers: rotary frequencies stay in float32, as transformers loads them.
        for parameter in network.parameters():
            if parameter.dtype == held:
                parameter.data = parameter.data.to(dtype)

    def attach(self, network: nn.Module, adapter: str, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        """Add the adapter of the configuration to ``network``; see ``attach_lora``."""
        attach_lora(
            network, self, self.config, dtype=dtype, compute_dtype=compute_dtype, device=self.device, adapter=adapter
        )


def default_lora_targets(network: Any) -> list[str]:
    """Last parts of the names of all linear layers of a causal language model but the output layer."""
    output = network.get_output_embeddings()
    layers = linear_layers(network).items()
    return sorted({name.rpartition(".")[2] for name, layer in layers if layer is not output})


def recompute_activations(network: Any) -> None:
    """Have each layer of a causal language model recompute its activations in the backward pass. Raises ``ValueError``
    if it has no layers that can."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in network.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"algorithm.prompt_writer.actor.enable_gradient_checkpointing: got true, but {type(network).__name__} has "
            "no layers that recompute; set it to false"
        )
    for layer in layers:
        # Not by transformers' own switch, which needs training mode, where some models drop activations out.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


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
    # From the first place on: logits of the requests would be the largest tensor of all.
    return log_probs_at(network, input_ids, places, int(request_lengths.min()) - 1)


def log_probs_at(
    network: Any, input_ids: Int[Tensor, "B L"], places: Int[Tensor, "B T"], first: int
) -> Float[Tensor, "B T"]:
    """Log-probs of the tokens that follow ``places``, none of which lies before ``first``; see ``token_log_probs``."""
    kept = input_ids.shape[1] - first
    logits = network(input_ids=input_ids, use_cache=False, logits_to_keep=kept).logits
    chosen = logits.gather(1, (places - first)[..., None].expand(-1, -1, logits.shape[-1])).float()
    tokens = input_ids.gather(1, places + 1)
    return chosen.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
