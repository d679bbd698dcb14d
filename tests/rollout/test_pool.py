"""Several engines as one: the same bits whoever draws, and engines that die, hang, mix up or hold the wrong adapter."""

import threading
import time
import warnings
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from rollout_cases import assert_same_bits, random_like, request_for
from tests_support import wait_until
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError, adapter_state
from flowgrpo_rc.rollout import (
    DiffusersEngine,
    EngineLostError,
    RolloutEngine,
    RolloutError,
    RolloutPool,
    RolloutSyncError,
)

LORA = ModelConfig(lora_rank=4, lora_alpha=4)
IMAGES = 7
CHUNK = 3
"""7 images are drawn as 3, 3 and 1."""
WAIT_S = 60
"""So long a test waits for another thread before it fails."""


class Here:
    """An engine of this process as a handle, with places where a fault can sit. One lock keeps calls apart, since all
    share the model's transformer."""

    turn = threading.Lock()

    def __init__(self, model, name, *, dtype=torch.float32):
        self.name = name
        self.engine = DiffusersEngine(model, LORA, dtype=dtype, micro_batch_size=CHUNK, device="cpu")
        self.starts = 0
        self.drawn = []
        self.given = []
        self.closed = False

    def start(self):
        self.starts += 1
        self.engine.adapter_version = -1

    def sync(self, state, version):
        self.given.append(version)
        with self.turn:
            return self.engine.sync(state, version)

    def generate(self, request):
        with self.turn:
            answer = self.engine.generate(request)
        self.drawn += request.seeds
        return answer

    def close(self):
        self.closed = True


@pytest.fixture
def make_pool(tiny_model):
    pools = []

    def make(*kinds, dtype=torch.float32, micro_batch_size=CHUNK):
        handles = [kind(tiny_model, f"engine {i}", dtype=dtype) for i, kind in enumerate(kinds or (Here, Here))]
        rule = handles[0].engine.digest_of
        pools.append(RolloutPool(handles, digest_of=rule, dtype=dtype, micro_batch_size=micro_batch_size))
        return pools[-1], handles

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def alone(tiny_model):
    """The engine of this process, which draws all chunks itself."""
    return DiffusersEngine(tiny_model, LORA, dtype=torch.float32, micro_batch_size=CHUNK, device="cpu")


@pytest.fixture
def make_request(tiny_model):
    index = (0, 0, 1, 1, 2, 0, 2)
    starts = tuple(i % 2 for i in range(IMAGES))
    return partial(request_for, tiny_model, index=index, starts=starts, steps=3)


def state_of(alone, scale=1.0):
    """An adapter that changes the images."""
    return random_like(adapter_state(alone.transformer, alone.adapter), 0.2 * scale)


def drawn_alone(alone, request, state, version=0):
    alone.sync(state, version)
    return alone.generate(request)


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"cfg": 3.0}, {"window": 0}], ids=["plain", "guided", "validation"])
def test_the_bits_do_not_depend_on_who_draws(engines, settings, make_pool, alone, make_request):
    pool, handles = make_pool(*[Here] * engines)
    assert isinstance(pool, RolloutEngine)
    request = make_request(**settings)
    state = state_of(alone)
    digest = pool.sync(state, 0)
    found = pool.generate(request)
    expected = drawn_alone(alone, request, state)
    assert digest == expected.echo.adapter_digest == pool.digest_of(state)
    assert_same_bits(found, expected)
    assert sorted(seed for handle in handles for seed in handle.drawn) == sorted(request.seeds)


def test_images_come_in_order_to_who_waits_and_to_who_does_not(make_pool, alone, make_request):
    others_are_drawn = threading.Event()

    class SlowFirst(Here):
        """Draws the first chunk last."""

        def generate(self, request):
            if request.request_id.endswith("/0"):
                assert others_are_drawn.wait(WAIT_S)
            answer = super().generate(request)
            if request.request_id.endswith("/6"):
                others_are_drawn.set()
            return answer

    pool, _ = make_pool(SlowFirst, SlowFirst)
    state = state_of(alone)
    pool.sync(state, 0)
    request = make_request()
    arrived = []
    came = []
    pending = pool.submit(request, lambda rows, images: arrived.append((rows.tolist(), images)))
    wait_until(lambda: len(arrived) == 3)
    found = pending.result(lambda rows, images: came.append((rows.tolist(), images)))
    for calls in (arrived, came):
        assert [rows for rows, _ in calls] == [[0, 1, 2], [3, 4, 5], [6]]
        assert torch.equal(torch.cat([images for _, images in calls]), found.images)
    assert_same_bits(found, drawn_alone(alone, request, state))


def test_requests_wait_in_line_each_with_its_own_adapter(make_pool, alone, make_request):
    """Two requests in flight under different adapters, and a third adapter that changes what the engines hold."""
    pool, _ = make_pool()
    scales = (1.0, -2.0, 0.5)
    requests = [make_request(seed=seed) for seed in range(2)]
    pending = []
    for version, scale in enumerate(scales):
        state = state_of(alone, scale)
        held = pool.push(state, version)
        assert (held.version, held.digest) == (version, alone.digest_of(state))
        pending += [pool.submit(request) for request in requests[version : version + 1]]
        for tensor in state.values():  # the actor goes on learning in place
            tensor.mul_(3.0)
    # Before the engine of this test draws, since all share one transformer.
    found = [one.result() for one in pending]
    for version, request in enumerate(requests):
        expected = drawn_alone(alone, request, state_of(alone, scales[version]), version)
        assert_same_bits(found[version], expected)


def dying(during, times=1, comes_back=True):
    """Engines of which the first to do this dies of it, so many times, and may not start again."""

    class Dying(Here):
        deaths = 0

        def die(self, method):
            if method == during and Dying.deaths < times:
                Dying.deaths += 1
                self.engine.adapter_version = -1
                raise EngineLostError(f"{self.name} died while {method}")

        def start(self):
            super().start()
            if self.starts > 1 and not comes_back:
                raise EngineLostError("no such machine")

        def sync(self, state, version):
            self.die("syncing")
            return super().sync(state, version)

        def generate(self, request):
            self.die("drawing")
            return super().generate(request)

    return Dying


@pytest.mark.parametrize("during", ["drawing", "syncing"])
@pytest.mark.parametrize("engines", [1, 2])
def test_what_a_lost_engine_was_to_draw_is_dealt_again(during, engines, make_pool, alone, make_request):
    pool, handles = make_pool(*[dying(during)] * engines)
    state = state_of(alone)
    request = make_request()

    def draw():
        pool.sync(state, 0)
        found = pool.generate(request)
        pool.sync(state_of(alone, 2.0), 1)
        return found

    with pytest.warns(UserWarning, match=rf"engine \d is started anew: engine \d died while {during}"):
        found = draw()
    assert_same_bits(found, drawn_alone(alone, request, state))
    assert sum(handle.starts for handle in handles) == engines + 1
    assert all(handle.engine.adapter_version == 1 for handle in handles)


def test_an_engine_that_does_not_come_back_is_given_up_and_the_others_go_on(make_pool, alone, make_request):
    pool, handles = make_pool(dying("drawing", comes_back=False), Here)
    state = state_of(alone)
    pool.sync(state, 0)
    for seed in range(2):
        request = make_request(seed=seed)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = pool.generate(request)
        if any("given up" in str(one.message) for one in told):
            assert "rollout engine engine 0 is given up: no such machine" in [str(one.message) for one in told]
        assert_same_bits(found, drawn_alone(alone, request, state))
    assert pool.sync(state_of(alone, 2.0), 1) == alone.digest_of(state_of(alone, 2.0))
    wait_until(lambda: handles[0].closed)


def test_engines_lost_while_nobody_waits_are_told_of_before_the_failure(make_pool, alone, make_request):
    """As while the actor learns: the next call gives it another adapter, or asks for the next batch."""
    state = state_of(alone)
    everywhere = "no rollout engine is left of 2: engine 0: no such machine; engine 1: no such machine"
    for call in (lambda pool: pool.push(state, 1), lambda pool: pool.submit(make_request())):
        pool, _ = make_pool(*[dying("drawing", times=9, comes_back=False)] * 2)
        pool.sync(state, 0)
        pool.submit(make_request())
        wait_until(lambda: not any(thread.name.startswith("rollout engine") for thread in threading.enumerate()))
        with pytest.warns(UserWarning, match="is given up") as told, pytest.raises(RolloutError, match=everywhere):
            call(pool)
        words = [str(one.message) for one in told]
        for name in ("engine 0", "engine 1"):
            assert f"rollout engine {name} is started anew: {name} died while drawing" in words
            assert f"rollout engine {name} is given up: no such machine" in words


def test_images_that_cost_one_engine_after_the_other_are_taken_for_the_cause(make_pool, alone, make_request):
    class Stumbling(Here):
        def generate(self, request):
            if request.request_id.endswith("/3"):
                raise EngineLostError("out of memory")
            return super().generate(request)

    pool, _ = make_pool(Stumbling, Stumbling, Stumbling, Stumbling)
    pool.sync(state_of(alone), 0)
    words = r"images 3 to 5 of a rollout have cost 3 engines one after the other, the last one engine \d: out of memory"
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(RolloutError, match=words):
        pool.generate(make_request())


def test_engines_that_go_down_together_cost_a_chunk_one_loss(make_pool, alone, make_request):
    """As where the node or the process that they share is gone: those that are idle find out with the same chunk."""

    class Sharing(Here):
        lost = threading.Semaphore(0)
        drawing = threading.Event()
        gone = threading.Event()

        def start(self):
            super().start()
            if self.starts > 1:  # it takes longer than the others need to find out
                self.lost.acquire(timeout=5)

        def generate(self, request):
            if self.starts > 1:
                return super().generate(request)
            self.drawing.set()
            self.gone.wait(WAIT_S)
            losses.append(self.name)
            if len(losses) == 4:
                self.lost.release(4)
            raise EngineLostError("the node is gone")

    losses = []
    pool, _ = make_pool(Sharing, Sharing, Sharing, Sharing, micro_batch_size=IMAGES)
    state = state_of(alone)
    request = make_request()
    pool.sync(state, 0)
    pending = pool.submit(request)
    assert Sharing.drawing.wait(WAIT_S)
    Sharing.gone.set()
    with pytest.warns(UserWarning, match="is started anew: the node is gone"):
        found = pending.result()
    assert_same_bits(found, drawn_alone(alone, request, state))


def test_a_rollout_that_was_taken_is_kept_nowhere(make_pool, alone, make_request):
    """Engines wait for the next one meanwhile, and its recorded steps may fill gigabytes."""
    pool, _ = make_pool()
    pool.sync(state_of(alone), 0)
    pending = pool.submit(make_request())
    found = weakref.ref(pending)
    pending.result()
    del pending
    wait_until(lambda: found() is None)  # a thread may still be at the end of its last chunk


def test_an_engine_that_does_not_start_is_refused_and_the_others_are_closed(make_pool):
    class Broken(Here):
        def start(self):
            raise EngineLostError("the model does not fit")

    closed = []

    class Noted(Here):
        def close(self):
            closed.append(self.name)

    refused = "rollout engine engine 1 does not start: the model does not fit"
    with pytest.warns(UserWarning, match="does not fit"), pytest.raises(RolloutError, match=refused):
        make_pool(Noted, Broken)
    assert closed == ["engine 0"]


class Stale(Here):
    """Acknowledges every adapter after the first, and keeps what it had."""

    def sync(self, state, version):
        if not self.given:
            return super().sync(state, version)
        self.engine.adapter_version = version
        return self.engine._held_digest()


class LyingStale(Stale):
    """Says what it should hold."""

    def sync(self, state, version):
        super().sync(state, version)
        return self.engine.digest_of(state)


class Patient(Here):
    """Leaves the work to the other one until that has done something wrong."""

    def generate(self, request):
        time.sleep(0.2)
        return super().generate(request)


class Late(Here):
    """Answers with what it was asked before."""

    last = None

    def generate(self, request):
        answer = super().generate(request)
        self.last, answer = answer, self.last or answer
        return answer


class OtherSchedule(Here):
    """Another program or model."""

    def generate(self, request):
        answer = super().generate(request)
        return replace(answer, echo=replace(answer.echo, sigmas=answer.echo.sigmas * 1.001))


class Refusing(Here):
    """Answers with an error of its own, which keeps its kind."""

    def sync(self, state, version):
        raise AdapterMismatchError("does not bind")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Refusing, "^rollout engine engine 1: does not bind$"),
        (Stale, "rollout engine engine 1: adapter version 1: digest of the engine's weights"),
        (LyingStale, "rollout engine engine 1: adapter version 1: digest of the engine's weights"),
        (OtherSchedule, "sigmas: images of one rollout were drawn with"),
        (Late, "rollout engine engine 1: asked for the [13] images of .*; the engine has mixed up its results"),
    ],
)
def test_one_engine_that_goes_wrong_is_found_by_name(kind, words, make_pool, alone, make_request):
    pool, _ = make_pool(Patient, kind)

    def run():
        for version in range(3):
            pool.sync(state_of(alone, 1.0 + version), version)
            pool.generate(make_request(seed=version))

    with pytest.raises(AdapterMismatchError if kind is Refusing else RolloutSyncError, match=words):
        run()


def test_close_ends_what_is_in_flight(make_pool, alone, make_request):
    class Hanging(Here):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.ended = threading.Event()

        def generate(self, request):
            assert self.ended.wait(WAIT_S)
            raise EngineLostError("ended")

        def close(self):
            super().close()
            self.ended.set()

    pool, handles = make_pool(Hanging, Hanging)
    pool.sync(state_of(alone), 0)
    pending = pool.submit(make_request())
    pool.close()
    pool.close()
    assert all(handle.closed and handle.starts == 1 for handle in handles)
    with pytest.raises(RolloutError, match="the rollout engines are closed"):
        pending.result()


def test_the_account_has_work_in_progress_and_losses(make_pool, alone, make_request):
    class Slow(Here):
        at_work = threading.Event()
        may_go_on = threading.Event()

        def generate(self, request):
            self.at_work.set()
            assert self.may_go_on.wait(WAIT_S)
            if self.starts == 1:
                raise EngineLostError("killed")
            return super().generate(request)

    pool, _ = make_pool(Slow)
    with pytest.raises(RolloutError, match="has no adapter yet"):
        pool.generate(make_request())
    pool.push(state_of(alone), 7)
    pending = pool.submit(make_request())
    assert Slow.at_work.wait(WAIT_S)
    before = time.perf_counter()
    (account,) = pool.take_account()
    assert [work.what for work in account.done] == ["start", "sync"]
    assert account.doing is not None
    assert (account.doing.what, account.doing.rows, account.doing.version) == ("draw", CHUNK, 7)
    assert account.doing.begin <= before <= account.doing.end
    assert not account.given_up
    Slow.may_go_on.set()
    with pytest.warns(UserWarning, match="is started anew: killed"):
        pending.result()
    (account,) = pool.take_account()
    assert [work.what for work in account.done] == ["lost", "start", "sync", "draw", "draw", "draw"]
    assert (account.done[0].rows, account.done[0].version) == (CHUNK, 7)
    assert account.done[0].begin < before < account.done[0].end
    assert sum(work.rows for work in account.done if work.what == "draw") == IMAGES
    assert account.doing is None
    assert not pool.take_account()[0].done


def test_adapters_are_sent_in_the_engines_dtype(make_pool, alone, make_request):
    sent = []

    class Noting(Here):
        def sync(self, state, version):
            sent.append(state)
            return super().sync(state, version)

    pool, _ = make_pool(Noting, dtype=torch.bfloat16)
    state = state_of(alone)
    assert pool.sync(state, 0) == pool.digest_of(state)
    (given,) = sent
    for name, tensor in given.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # pickled, a view would take all of its block along
        assert_close(tensor, state[name].bfloat16(), rtol=0, atol=0)
