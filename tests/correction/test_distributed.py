"""Two gloo processes with one shard each against one process that holds both."""

import math

import distributed_shards as shards
import pytest
import torch

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each of the two processes."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    torch.multiprocessing.spawn(shards.work, args=(folder,), nprocs=2)
    return [torch.load(f"{folder}/rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def whole():
    return shards.results(shards.data(), micro_batches=1)


@pytest.mark.parametrize("level", shards.LEVELS)
def test_batch_normalisation_spans_the_ranks(ranks, whole, level):
    joined = torch.cat([rank[level]["weights"] for rank in ranks])
    torch.testing.assert_close(joined, whole[level]["weights"], rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.cat([rank[level]["mask"] for rank in ranks]), whole[level]["mask"])
    for rank in ranks:
        assert rank[level]["factor"] == pytest.approx(whole[level]["factor"], rel=1e-12)


@pytest.mark.parametrize("level", shards.LEVELS)
def test_accumulated_metrics_are_those_of_all_rows(ranks, whole, level):
    for rank in ranks:
        assert rank[level]["accumulated"] == pytest.approx(whole[level]["accumulated"], rel=1e-9, abs=1e-9)
    assert any("/ts_" in name for name in whole[level]["accumulated"])


@pytest.mark.parametrize("level", shards.LEVELS)
def test_a_rank_without_results_still_gets_the_metrics(ranks, level):
    first, second = (rank[level]["accumulated_where_present"] for rank in ranks)
    assert first == second
    assert first["rollout_corr/kl"] != pytest.approx(ranks[0][level]["accumulated"]["rollout_corr/kl"])


@pytest.mark.parametrize("level", shards.LEVELS)
def test_diffusion_batch(ranks, whole, level):
    joined = torch.cat([rank[level]["batch_weights"] for rank in ranks])
    torch.testing.assert_close(joined, whole[level]["batch_weights"], rtol=1e-6, atol=0)
    assert torch.equal(torch.cat([rank[level]["batch_keep"] for rank in ranks]), whole[level]["batch_keep"])
    for rank in ranks:
        assert rank[level]["batch_metrics"] == pytest.approx(whole[level]["batch_metrics"], rel=1e-9, abs=1e-9)


def test_a_group_of_one_rank_normalises_alone(ranks, whole):
    for rank, found in enumerate(ranks):
        rows = shards.shard(rank)
        alone = shards.compute_rollout_correction(rows["p"], rows["q"], rows["mask"], config=shards.config("token"))
        factor = alone.metrics["rollout_corr/rollout_is_batch_norm_factor"]
        assert found["own_factor"] == pytest.approx(factor, rel=1e-12)
        assert factor != pytest.approx(whole["token"]["factor"], rel=1e-3)


def test_the_mean_is_exact_whatever_sides_of_one_half_the_ranks_are_on(ranks):
    cases = [case for case in shards.SIDES for _ in shards.LEVELS]
    for i, case in enumerate(cases):
        weights = [math.exp(log_ratio) for log_ratio in case]
        mean = sum(n * w for n, w in zip(shards.SIZES, weights, strict=True)) / sum(shards.SIZES)
        for rank, found in enumerate(ranks):
            assert found["sides"][i]["factor"] == pytest.approx(mean, rel=2e-6, abs=0)
            assert found["sides"][i]["weight"] == pytest.approx(weights[rank] / mean, rel=2e-6, abs=0)
