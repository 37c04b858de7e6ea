"""The simulated engine's output: the next turn of a script, or random tokens derived from seed and prompt."""

import math
import random
from array import array
from collections.abc import Sequence

from trackway.rollout.engines.protocol import FinishReason
from trackway.rollout.sim_settings import SimSettings
from trackway.wire.rollout import SamplingParams

_TAIL = 32
_LOGPROBS = [-0.02 - 0.05 * (place % 61) for place in range(1024)]


class Answers:
    """Generates answers: (tokens, logprobs, finish reason)."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self._script = [_bytes(turn) for turn in settings.script]

    def answer(
        self, prompt: Sequence[int], params: SamplingParams, limit: int, version: int
    ) -> tuple[list[int], list[float], FinishReason]:
        """The answer for a prompt, seed and version, always the same, of at most `limit` tokens."""
        draw = random.Random() if params.seed is None else random.Random(_digest(prompt, params.seed, version))
        tokens = self._scripted(prompt) if self._script else self._random(draw, params, limit)
        ending: FinishReason = "stop"
        stops = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, self._settings.eos_token_id}
        end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens) - 1) + 1
        if end > limit or (params.ignore_eos and not self._script and tokens[end - 1] not in stops):
            end, ending = min(end, limit), "length"
        shift = draw.randrange(1024)
        return tokens[:end], [_LOGPROBS[(token + shift) % 1024] for token in tokens[:end]], ending

    def _random(self, draw: random.Random, params: SamplingParams, limit: int) -> list[int]:
        settings = self._settings
        if params.ignore_eos:
            return self._words(draw, limit)
        spread = settings.response_spread
        length = settings.response_tokens * math.exp(spread * draw.gauss() - spread * spread / 2)
        return [*self._words(draw, min(limit, max(0, round(length) - 1))), settings.eos_token_id]

    def _words(self, draw: random.Random, count: int) -> list[int]:
        """Random tokens other than the end-of-sequence token."""
        eos = self._settings.eos_token_id
        return [token + (token >= eos) for token in draw.choices(range(self._settings.vocab_size - 1), k=count)]

    def _scripted(self, prompt: Sequence[int]) -> list[int]:
        """The script's turn after those in the prompt; if the prompt ends within a turn, the rest of it."""
        text, turn, start = _bytes(prompt), 0, 0
        while turn < len(self._script) and (position := text.find(self._script[turn], start)) >= 0:
            start = position + len(self._script[turn])
            turn += 1
        wanted = self._settings.script[min(turn, len(self._script) - 1)]
        tail = list(prompt[start // 4 :])
        begun = next((n for n in range(len(wanted) - 1, 0, -1) if tail[-n:] == wanted[:n]), 0)
        return wanted[begun:]


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _digest(prompt: Sequence[int], seed: int, version: int) -> int:
    return hash((seed, version, len(prompt), *prompt[-_TAIL:]))
