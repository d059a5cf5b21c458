"""The average of a run's last checkpoints is evaluated, generates, is exported, and another run begins with it."""

import hlat
from hlat.checkpoint.protocol.reader import open_checkpoint
from tests.support.checkpoint.saved_states import assert_equal

RUN = ["training.steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=3", "evaluation.every_steps=null"]


def test_the_average_of_a_run_is_used_like_any_checkpoint(cli, recipe_file, tiny, tmp_path):
    run, out = tmp_path / "run", tmp_path / "average"
    done = cli("train", recipe_file, *tiny, *RUN)
    assert done.returncode == 0, done.stderr
    done = cli("average", run, "--last", "3", "--coefficients", "1,1,2", "--to", out)
    assert done.returncode == 0, done.stderr
    assert "50.00% of step 6" in done.stdout
    again = hlat.average(sorted((run / "checkpoints").glob("step-*")), tmp_path / "again", coefficients=[1, 1, 2])
    assert_equal(open_checkpoint(again).load(""), open_checkpoint(out).load(""))

    losses = [hlat.evaluate(place, run / "data").loss for place in (out, run)]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 1
    assert isinstance(hlat.generate(out, "the cat", max_tokens=3), str)
    done = cli("export", out, "--to", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    begun = [f"run.dir={tmp_path / 'next'}", f"checkpoint.init_from={out}", f"data.tokenizer.path={out / 'tokenizer'}"]
    done = cli("train", recipe_file, *tiny, *RUN, *begun)
    assert done.returncode == 0, done.stderr


def test_wrong_words_are_one_message(cli, tmp_path):
    done = cli("average", tmp_path, tmp_path, "--coefficients", "1,x", "--to", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: --coefficients 1,x: not numbers. Write them with commas, as in 1,2,1."
