"""A batch being decoded, on the host's side: its room, its history, and the state that it lends to the device."""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvlab import loop
from kvlab.core import PAGE
from kvlab.errors import CapacityError, ConfigError
from kvlab.loop import NEVER, State, Steps
from kvlab.models import Model
from kvlab.policy import Policy
from kvlab.sampling import Sampling
from kvlab.sampling import keys as sampling_keys

WATCHABLE = frozenset({"logits", "outputs", "entropy", "reads", "bound"})
CHUNK = 256  # tokens of a turn that go through the layers together
SHORT = 16  # tokens of a question, which is not padded to a page


class Session:
    """A batch being decoded. It owns its caches: `run`, `extend` and `truncate` donate them and take the new ones back.

    Attributes:
      mode: "record" (the prompt was exact and compressed afterwards) or "streamed" (it went through the caches).
      limits: tokens, prompt included, that each row may come to.
      fill_seconds: how long filling the caches took.
      step_seconds: wall time of every `run`, with its number of steps.
      pending: per row the token that was sampled last and not fed yet; −1 where there is none.
      tokens: `[B][samples]`: the token sampled after the prompt, after every step and after every turn (−1: none).
    """

    def __init__(
        self, model: Model, policies: Sequence[Policy], state: State, limit: int, forced: Sequence[Sequence[int]],
        stops: Sequence[int], sampling: Sampling | None, seed: int | Sequence[int], mode: str = "record",
    ):  # fmt: skip
        B = len(state.token_B)
        if len(forced) not in (0, B):
            raise ConfigError(f"forced tokens for {len(forced)} rows of {B}; give one list for each row, or none")
        self.model, self.policies, self.mode = model, tuple(policies), mode
        self.limits = np.full(B, limit)
        self._most = limit
        self.fill_seconds = 0.0
        self.step_seconds: list[tuple[float, int]] = []
        width = -(-max([len(f) for f in forced] + [1]) // PAGE) * PAGE  # so that lengths close by share a trace
        self._forced = padded(forced or [[]] * B, width, -1)
        self._stops = frozenset(map(int, stops))
        self._how = sampling and sampling.rows(B)
        if sampling:
            first = jnp.full((B, model.config.vocab), NEVER)
            state = dataclasses.replace(state, key_B=sampling_keys(seed, B), first_BV=first)
        self.state = state
        self._has_next = np.zeros(B, bool)
        self._sampled: list[np.ndarray] = []

    # ------------------------------------------------------------------------------------------------------- running

    def run(self, n: int = 1, watch: Sequence[str] = (), follow: np.ndarray | None = None) -> Steps:
        """Feeds n tokens per row in one jitted loop, which ends early once every row has stopped.

        Args:
          watch: what to return besides tokens: "logits", "outputs" of attention, "entropy", "reads", "bound".
          follow: positions of tokens `[B, W]` (−1 for none); `Steps.followed` says what became of them.
        Errors: CapacityError before the loop when fewer than n tokens fit; the session stays usable.
        """
        watched = self._watched(watch, follow)
        if n > self.room:
            raise CapacityError(f"{n} more tokens asked for, {self.room} fit; start the session with a larger new_tokens")
        if not self._has_next.all():
            raise ConfigError(f"rows {np.flatnonzero(~self._has_next).tolist()} were cut back; extend them by a token first")
        stops = jnp.asarray(sorted(self._stops) or [-2], jnp.int32)
        begin = time.perf_counter()
        args = self.model.config, self.model.params, self.policies, self.state, self._how, self._forced, stops
        self.state, steps = jax.block_until_ready(loop.decode(*args, n=n, watch=watched, follow_BW=follow))
        self.step_seconds.append((time.perf_counter() - begin, int(steps.taken)))
        self._sampled.append(np.asarray(steps.tokens_nB))
        return steps

    def _watched(self, watch: Sequence[str], follow) -> frozenset[str]:
        """Errors: ConfigError for a name that nobody knows, or positions that are not W for every row."""
        if unknown := set(watch) - WATCHABLE:
            raise ConfigError(f"watch={sorted(unknown)} is unknown; allowed: {', '.join(sorted(WATCHABLE))}")
        if follow is None:
            return frozenset(watch)
        if np.ndim(follow) != 2 or len(follow) != len(self._has_next):
            raise ConfigError(f"follow has the shape {np.shape(follow)}; give [{len(self._has_next)}, W], −1 for none")
        return frozenset({*watch, "followed"})

    def stream(self, n: int, each: Callable[[np.ndarray], None], every: int = 1) -> None:
        """Runs up to n steps, handing the new tokens `[B, ≤ every]` to `each` as they come (−1 where a row had stopped)."""
        while n > 0 and not self.done:
            steps = self.run(min(every, n))
            each(np.asarray(steps.tokens_nB).T)
            n -= every

    # ------------------------------------------------------------------------------------------------ turns and rollback

    def extend(self, turns: Sequence[Sequence[int]]) -> None:
        """Feeds more tokens to each row in chunks (none to a row with an empty list) and samples the next one.

        Rows that had stopped go on. The pending token is not fed unless it is the turn's first. Errors: CapacityError.
        """
        self._chunks(turns, every=False)

    def predict(self, turns: Sequence[Sequence[int]]) -> np.ndarray:
        """As `extend`; the logits after every token of the turns, `[B, longest turn, V]`, 0 past a turn's end."""
        return np.concatenate(self._chunks(turns, every=True), 1)

    def _chunks(self, turns: Sequence[Sequence[int]], every: bool) -> list[np.ndarray]:
        """Feeds turns and samples; of each chunk the logits after `every` token, if so."""
        if len(turns) != len(self.lengths) or not any(map(len, turns)):
            raise ConfigError(f"a turn for each of {len(self.lengths)} rows is needed, and a token in one; given: {len(turns)}")
        if self._sampled:  # the prompt of a stream comes before anything that is forced
            self._check_forced()
        length = self.lengths + [len(t) for t in turns]
        if (over := length > self.limits).any():
            row = int(np.argmax(over))
            raise CapacityError(
                f"the turn makes {length[row]} tokens in row {row}, which holds {self.limits[row]}; start with more new_tokens"
            )
        seen: list[np.ndarray] = []
        last = None
        for begin in range(0, max(map(len, turns)), CHUNK):
            part = [t[begin : begin + CHUNK] for t in turns]
            count = np.array([len(t) for t in part], np.int32)
            tokens = padded(part, turn_width(max(count)))
            args = self.model.config, self.model.params, self.policies, self.state.caches, tokens, self.state.pos_B, count
            caches, new = loop.extend(*args, every=every)
            self.state = dataclasses.replace(self.state, caches=caches, pos_B=self.state.pos_B + count)
            if every:
                seen.append(np.where((np.arange(max(count)) < count[:, None])[..., None], new[:, : max(count)], 0.0))
                new = new[np.arange(len(count)), np.maximum(count, 1) - 1]
            last = new if last is None else jnp.where((count > 0)[:, None], new, last)
        self.continue_from(turns, last)
        return seen

    def continue_from(self, turns: Sequence[Sequence[int]], logits_BV) -> None:
        """Samples the next token of the rows that were just fed `turns`."""
        fed = np.array([len(t) > 0 for t in turns])
        state = self.state
        if self._how is not None:
            first = np.array(state.first_BV)
            for row, ids, end in zip(first, turns, self.lengths):
                np.minimum.at(row, np.asarray(ids, int), np.arange(end - len(ids), end))
            state = dataclasses.replace(state, first_BV=jnp.asarray(first))
        token = loop.draw(self._how, logits_BV, state.first_BV, state.key_B, state.pos_B)
        waiting = (self._forced[:, 0] >= 0) & (np.asarray(state.fed_B) == 0)
        stopped = np.isin(token, list(self._stops)) & ~waiting
        self.state = dataclasses.replace(
            state,
            token_B=jnp.where(fed, token, state.token_B),
            done_B=jnp.asarray(np.where(fed, stopped, state.done_B)),
        )
        self._has_next |= fed
        self._sampled.append(np.where(fed, token, -1)[None])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Cuts each row back to its first tokens; `extend` must follow. What remains is stored as it was.

        So raw caches are as if no more had come; where codes share a scale over a page, a page that was committed since keeps
        its codes. `tokens` and `answers` still tell what had been sampled.
        Errors: CapacityError where tokens that a row of this length would still have were dropped since.
        """
        self._check_forced()
        length = np.asarray(lengths, np.int32)
        if length.shape != self.lengths.shape or (length < 1).any() or (length > self.lengths).any():
            raise ConfigError(f"truncate to {list(lengths)}; allowed: for each row from 1 to {self.lengths.tolist()}")
        for layer, cache in enumerate(self.state.caches):
            lost = np.asarray(cache.lost).max(1)
            if (cut := (length < self.lengths) & (length <= lost)).any():
                row = int(np.argmax(cut))
                raise CapacityError(
                    f"row {row} cannot be cut back to {length[row]} tokens: layer {layer} dropped tokens when number "
                    f"{lost[row]} came; allowed: from {lost[row] + 1}, or a retention with a larger budget"
                )
        cut = length < self.lengths
        caches = loop.truncate(self.policies, self.state.caches, length)
        self.state = dataclasses.replace(self.state, caches=caches, pos_B=jnp.asarray(length))
        if self._how is not None:
            first = jnp.where(self.state.first_BV < length[:, None], self.state.first_BV, NEVER)
            self.state = dataclasses.replace(self.state, first_BV=first)
        self._has_next &= ~cut
        room = [np.asarray(policy.room(cache)).min(1).astype(np.int64) for policy, cache in zip(self.policies, caches)]
        self.limits = np.minimum(self._most, length + np.min(room, 0))

    def rows(self, index: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray | None = None) -> "Session":
        """Another session with the named rows, in that order (a row named twice is forked); this one stays usable.

        Args:
          tokens: what each row is fed next instead of what it had sampled; rows that had stopped go on.
        """
        pick = np.asarray(index)
        if not len(pick) or pick.min() < 0 or pick.max() >= len(self.lengths):
            raise ConfigError(f"rows {list(index)}; allowed: one or more of 0 … {len(self.lengths) - 1}")
        other = copy.copy(self)
        other.state = loop.rows(self.policies, self.state, pick, int((self.limits - self.lengths)[pick].max()))
        other.policies = tuple(policy.for_rows(pick) for policy in self.policies)
        other._how = jax.tree.map(lambda x: x[pick], self._how)
        other._forced, other._has_next, other.limits = self._forced[pick], self._has_next[pick], self.limits[pick]
        other._sampled, other.step_seconds = [x[:, pick] for x in self._sampled], []
        if tokens is not None:
            other._feed_next(np.array(tokens, np.int32))
        return other

    def _feed_next(self, token_B: np.ndarray) -> None:
        """Replaces what was sampled last."""
        self._check_forced()
        vocab, shape = self.model.config.vocab, self._has_next.shape
        if token_B.shape != shape or token_B.min() < 0 or token_B.max() >= vocab:
            raise ConfigError(f"tokens {token_B.tolist()}; allowed: one for each of {shape[0]} rows, from 0 to {vocab - 1}")
        self.state = dataclasses.replace(self.state, token_B=jnp.asarray(token_B), done_B=jnp.zeros(shape, bool))
        self._has_next = np.ones(shape, bool)
        self._sampled[-1] = token_B[None]

    def _check_forced(self) -> None:
        if ((self._forced >= 0).sum(1) > np.asarray(self.state.fed_B)).any():
            raise ConfigError("forced tokens are waiting to be fed; run them first")

    # ------------------------------------------------------------------------------------------------------ what there is

    @property
    def lengths(self) -> np.ndarray:
        """Tokens fed per row, prompt included."""
        return np.asarray(self.state.pos_B)

    @property
    def room(self) -> int:
        """Tokens that may still be fed to every row."""
        return int((self.limits - self.lengths).min())

    @property
    def pending(self) -> np.ndarray:
        return np.where(self._has_next, np.asarray(self.state.token_B), -1)

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate(self._sampled).T

    @property
    def done(self) -> bool:
        return bool(np.asarray(self.state.done_B).all())

    def answers(self) -> list[list[int]]:
        """What each row sampled after its forced tokens, without the stop token; also what was rolled back since."""
        given = (self._forced >= 0).sum(1)
        return [[t for t in row[k:].tolist() if t >= 0 and t not in self._stops] for row, k in zip(self.tokens, given)]


def bucket(length: int) -> int:
    """The power of two, at least a page, that a prompt is padded to."""
    return max(PAGE, 1 << (int(length) - 1).bit_length())


def turn_width(length: int) -> int:
    """What a chunk of a turn is padded to: SHORT, or else as a prompt is."""
    return SHORT if length <= SHORT else bucket(length)


def padded(rows: Sequence[Sequence[int]], width: int, fill: int = 0) -> np.ndarray:
    """Ragged rows of token ids as one array `[B, width]`."""
    made = np.full((len(rows), width), fill, np.int32)
    for row, ids in zip(made, rows):
        row[: len(ids)] = ids
    return made
