"""``hlat rehearse``: what a user is told of ranks, and programs in JSON."""

import json

from hlat.rehearsal import CATEGORIES

LARGE = [
    "hlat-70b", "model.layers=8", "batch.global_batch=256", "--world", "8192", "--rank", "0", "--rank", "7168",
]  # fmt: skip


def test_a_rank_in_words(cli, recipe_file):
    done = cli("rehearse", recipe_file, "data.path=none", "parallel.tensor=2", "--world", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0: pipeline 0, data 0, context 0, tensor 0; layers 0 to 1\n")
    assert "parameters" in done.stdout and "tensor         all_gather" in done.stdout


def test_a_batch_ramp_is_rehearsed_with_its_final_batch(cli, recipe_file):
    done = cli("rehearse", recipe_file, "data.path=none", "batch.ramp=[{tokens: 1000, global_batch: 4}]")
    assert done.returncode == 0 and "rehearsed with the final batch of 8 sequences" in done.stdout, done.stderr


def test_ranks_of_8192_as_json(cli):
    done = cli("rehearse", *LARGE, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["world"] == 8192
    assert found["layout"] == {"pipeline": 8, "data": 32, "context": 1, "tensor": 32, "zero": 1, "replicas": 1}
    assert [rank["rank"] for rank in found["ranks"]] == [0, 7168]
    for rank in found["ranks"]:
        memory = rank["memory"]
        assert sum(memory["at_peak"].values()) == memory["peak_bytes"] > 0
        assert memory["at_peak"].keys() == memory["between_steps"].keys() == CATEGORIES.keys()
        assert {one["axis"] for one in rank["messages"]} == {"tensor", "pipeline", "data", "pipeline+data+tensor"}
        assert rank["flops"] > 0 and rank["checkpoint"]["bytes"] > 0


def test_errors_are_messages(cli, recipe_file):
    for arguments, message in (
        (["--world", "3", "data.path=none"], "Try 12 or 24, or 1 or 2 processes"),
        (["--world", "2", "--rank", "2", "data.path=none"], "no rank 2 in a world of 2"),
        (["--world", "0", "data.path=none"], "--world"),
        (["precision.mode=fp8", "data.path=none"], "precision.mode=fp8: torch has no fp8 products on a cpu device"),
    ):
        done = cli("rehearse", recipe_file, *arguments)
        assert done.returncode == 2 and message in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
