"""Client of a reward server: sends images in batches and returns the scores in their order."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flowgrpo_rc.rewards.answer import AnswerError, joined, read_answer
from flowgrpo_rc.rewards.config import RemoteConfig
from flowgrpo_rc.rewards.http_client import Request as HTTPRequest
from flowgrpo_rc.rewards.http_client import ServerError, send_all
from flowgrpo_rc.rewards.registry import Places, Rows
from flowgrpo_rc.rewards.remote import protocols


class RemoteReward:
    """The reward of a server.

    Answers are checked like those of a local function: one finite number for each image. Anything else is an error that
    names the server, never a score.

    Args:
        name: of the section ``reward.remote.<name>``.
        config: that section.
    """

    computes_elsewhere = True
    """The server computes, so that images can be scored while the actor learns."""

    def __init__(self, name: str, config: RemoteConfig) -> None:
        config.check(f"reward.remote.{name}")
        self.name = name
        self.config = config
        self.streams = config.streams
        """Parts of a batch may be scored while the rest is drawn."""
        self._url = str(config.url)
        self._protocol = protocols.PROTOCOLS[config.protocol]
        self._format = config.image_format or self._protocol.image_format
        self._section = f"reward.remote.{name}"

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[np.ndarray, dict[str, list[Any]]]:
        """The server's scores.

        Args:
            images: (N, H, W, 3) uint8, RGB.
            prompts: N prompts.
            metadata: N dicts, the other columns of the prompt file; by default empty.

        Returns:
            (N,) float32; and lists of N entries that answers have beside the scores, None where one has none.

        Raises:
            AnswerError: the server did not answer, or not as it must; the message names its address.
        """
        # A prompt file of lines has no other columns.
        rows = [{} for _ in prompts] if metadata is None else [self._sent(row) for row in metadata]
        size = self.config.batch_size
        parts = [slice(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)]
        names = [f"{self._section}, images {part.start} to {part.stop - 1}" for part in parts]
        requests = [
            # Encoded when it is sent, so that not all batches are in memory at once.
            HTTPRequest(
                self._url,
                partial(self._body, images[part], list(prompts[part]), rows[part]),
                name=name,
                content_type=self._protocol.content_type,
            )
            for part, name in zip(parts, names, strict=True)
        ]
        answers = send_all(requests, self.config, self._section, self._protocol.read_answer)
        checked = []
        for part, name, answer in zip(parts, names, answers, strict=True):
            try:
                checked.append(read_answer(self.name, answer, prompts[part]))
            except AnswerError as error:
                raise ServerError(f"{self._url}: {name}: {error}") from error
        return joined(checked)

    def check_prompts(
        self,
        prompts: Sequence[str],
        *,
        image_size: tuple[int, int] | None = None,
        sources: Places = None,
        metadata: Rows = None,
    ) -> None:
        """Raise ``ValueError`` for rows that the protocol cannot send, and where the server does not score a grey image
        for the first prompt; see ``RewardMix.check_prompts``."""
        if metadata is not None:
            self._check_rows(metadata, sources or [f"prompt {index}" for index in range(len(metadata))])
        # Any size shows a missing server; the run's own also shows one that the server cannot take.
        height, width = image_size or (64, 64)
        image = np.full((1, height, width, 3), 128, np.uint8)
        try:
            self(image, prompts[:1], metadata[:1] if metadata else None)
        except AnswerError as error:
            raise ValueError(
                f"{self._section}.url: the server does not score a grey image for the first prompt: {error}"
            ) from error

    def _sent(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row that the server gets."""
        columns = self.config.columns
        return {name: value for name, value in row.items() if columns is None or name in columns}

    def _check_rows(self, rows: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> None:
        """Raise ``ValueError`` for the first column that no row has, or whose value the protocol cannot send."""
        field = f"{self._section}.columns"
        known = {name: None for row in rows for name in row}
        for column in self.config.columns or ():
            if column not in known:
                raise ValueError(f"{field}: no prompt has a column {column!r}; there are {', '.join(known) or 'none'}")
        for row, source in zip(rows, sources, strict=True):
            for column, value in self._sent(row).items():
                if protocols.are_references(value):  # files, which every protocol can send
                    continue
                try:
                    # Column by column, so that the message names the one.
                    self._protocol.write_request(protocols.Request(files=[], prompts=[], metadata=[{column: value}]))
                except protocols.ProtocolError as error:
                    raise ValueError(
                        f"{source}: the column {column!r} cannot be sent to the server: {error}; leave it out by "
                        f"naming in {field} those that the server needs ([] for none), or write it as text"
                    ) from error

    def _body(self, images: np.ndarray, prompts: list[str], rows: list[dict[str, Any]]) -> bytes:
        files = [protocols.encode(image, self._format) for image in images]
        return self._protocol.write_request(protocols.Request(files=files, prompts=prompts, metadata=rows))
