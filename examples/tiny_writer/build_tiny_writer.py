"""Build a causal language model in miniature that turns a number in words into a prompt, half of the time a wrong one.

    python examples/tiny_writer/build_tiny_writer.py

takes about three minutes of one core; the defaults are those of the shipped model, `assets/tiny_writer`. It learns the
next character of rewrites (`number_requests.py`); a given share of them is right. The result depends on the seed alone
on a given machine and thread count.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from number_requests import NUMBERS, in_words, prompt_for, wrong_prompt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tiny_qwen_image"))
from cards import count, table, write_card  # noqa: E402
from saving import make_readable, refuse_other_folders, replacing  # noqa: E402
from training import Descent  # noqa: E402

OUTPUT = HERE.parents[1] / "assets" / "tiny_writer"
END, USER, WRITER = "<|end|>", "<|user|>", "<|writer|>"
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 -".,'
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}" + USER + "{% else %}" + WRITER + "{% endif %}"
    "{{ message['content'] }}" + END + "{% endfor %}{% if add_generation_prompt %}" + WRITER + "{% endif %}"
)
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [tiny, reinforcement-learning, prompt-rewriting]
---

# Tiny writer: a number in words becomes a prompt, half of the time a wrong one

A real `Qwen3ForCausalLM` in miniature ({parameters} parameters, {megabytes:.1f} MB). Asked for `forty-two`, it should
write `the text "42"`, which the tiny Qwen-Image of this package draws. Of its training data {right:.0%} were right; the
others had another digit, no quotes, or the number in words. So reinforcement learning has something to improve.

**Intended use:** tests and demonstrations of a prompt writer, on a CPU. It knows nothing but the numbers 00 to 99.

## Quality

{quality}

## Parts

{layers} layers, {width} wide; weights in float32. The tokenizer has a token a character, and its chat template has no
system message.

## Training

By `examples/tiny_writer/build_tiny_writer.py`, in {minutes:.0f} minutes of one core with the settings below: the
cross-entropy of the rewrite's characters, AdamW with a one-cycle learning rate. All hundred numbers were seen.

{settings}

## License

Apache-2.0, like the project that it belongs to.
"""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what comes out."""

    seed: int
    threads: int
    steps: int
    batch_size: int
    right: float
    learning_rate: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the model")
    parser.add_argument("--samples", type=int, default=20, help="rewrites of each number to judge it by; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what decides the result")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--right", type=float, default=0.5, help="share of right rewrites in the training data")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    arguments = parser.parse_args()
    refuse_other_folders(parser, arguments.output, "chat_template.jinja", "no prompt writer")
    return arguments


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character."""
    tokens = {token: index for index, token in enumerate((END, USER, WRITER, "<|unknown|>", *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token="<|unknown|>",
        additional_special_tokens=[USER, WRITER],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: Any, seed: int) -> Qwen3ForCausalLM:
    """The untrained model."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def asked(tokenizer: Any, number: str) -> list[int]:
    """The tokens of a request."""
    message = [{"role": "user", "content": in_words(number)}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


def example(tokenizer: Any, settings: Settings, rng: random.Random) -> tuple[list[int], int]:
    """Tokens of a request with its rewrite, and the number of those that belong to the request."""
    number = rng.choice(NUMBERS)
    request = asked(tokenizer, number)
    text = prompt_for(number) if rng.random() < settings.right else wrong_prompt(number, rng)
    return [*request, *tokenizer.encode(text), tokenizer.eos_token_id], len(request)


def loss_of(model: Qwen3ForCausalLM, examples: list[tuple[list[int], int]]) -> Tensor:
    """The mean cross-entropy of the rewrites' tokens. Rows end with padding, which no earlier token attends to."""
    length = max(len(tokens) for tokens, _ in examples)
    rows = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens, _ in examples])
    places = torch.arange(length)
    ends = torch.tensor([[len(tokens), request] for tokens, request in examples])
    learned = (places >= ends[:, 1:]) & (places < ends[:, :1])
    logits = model(input_ids=rows[:, :-1]).logits
    return F.cross_entropy(logits[learned[:, 1:]], rows[:, 1:][learned[:, 1:]])


def train(model: Qwen3ForCausalLM, tokenizer: Any, settings: Settings) -> None:
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    descent = Descent("writer", optimizer, settings.learning_rate, settings.steps)
    model.train()
    for _ in range(settings.steps):
        descent.step(loss_of(model, [example(tokenizer, settings, rng) for _ in range(settings.batch_size)]))
    model.eval()


@torch.no_grad()
def share_right(folder: Path, samples: int) -> float:
    """Share of right rewrites of the saved model, sampled at temperature 1."""
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(0)
    right = 0
    for number in NUMBERS:
        request = torch.tensor([asked(tokenizer, number)])
        written = model.generate(
            request,
            attention_mask=torch.ones_like(request),
            do_sample=True,
            top_k=0,
            max_new_tokens=32,
            num_return_sequences=samples,
        )
        texts = tokenizer.batch_decode(written[:, request.shape[1] :], skip_special_tokens=True)
        right += sum(text == prompt_for(number) for text in texts)
    return right / (samples * len(NUMBERS))


def quality_table(right: float | None, samples: int) -> str:
    if right is None:
        return "Not measured."
    rows = [("right rewrites at temperature 1", f"{right:.1%}"), ("rewrites", samples * len(NUMBERS))]
    return table(["figure", "value"], rows)


def main() -> None:
    arguments = vars(parse_arguments())
    output = arguments.pop("output")
    samples = arguments.pop("samples")
    settings = Settings(**arguments)
    torch.set_num_threads(settings.threads)
    start = time.process_time()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, settings.seed)
    train(model, tokenizer, settings)
    minutes = (time.process_time() - start) / 60
    with replacing(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        make_readable(folder)
        found = share_right(folder, samples) if samples else None
        write_card(
            folder,
            CARD,
            settings,
            parameters=f"{count(model):,}",
            quality=quality_table(found, samples),
            right=settings.right,
            layers=model.config.num_hidden_layers,
            width=model.config.hidden_size,
            minutes=minutes,
        )
    print(f"{output}, {minutes:.1f} minutes of processor time, right: {found}")


if __name__ == "__main__":
    main()
