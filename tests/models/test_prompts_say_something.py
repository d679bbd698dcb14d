"""Prompts that give the text encoders nothing to read are found when they are loaded."""

import pytest

from flowgrpo_rc.models.prompts import check_prompts


def places(*texts):
    return [(text, f"train.txt:{number}") for number, text in enumerate(texts, 1)]


def test_prompts_that_are_read_whole(tiny_model, tiny_sd3_model):
    assert check_prompts(tiny_model, places('the text "42"', "a", "é"), 64) is None
    assert check_prompts(tiny_sd3_model, places("a cat", "b"), 64) is None


def test_prompts_that_are_cut_are_counted(tiny_model, tiny_sd3_model):
    """Of Stable Diffusion 3 the T5's limit counts; its CLIPs always read their own 14 tokens."""
    cut = check_prompts(tiny_model, places("a", "b" * 100, "c" * 90), 32)
    assert cut is not None
    assert "max_sequence_length=32 cuts off the ends of 2 of 3 prompts (the first: train.txt:2, 100 tokens of" in cut
    cut = check_prompts(tiny_sd3_model, places("a", "a b c d e f g h i j k l m n o p"), 20)
    assert cut is not None
    assert "(the first: train.txt:2," in cut
    assert "of which 19 are read)" in cut


def test_a_prompt_whose_text_lies_behind_the_limit(tiny_model):
    with pytest.raises(ValueError, match=r"train\.txt:2: .* says nothing to the model: its first 8 tokens"):
        check_prompts(tiny_model, places("a", "\n" * 600 + "text"), 8)
    assert check_prompts(tiny_model, places("a", "\n" * 4 + "text"), 64) is None


def test_a_prompt_of_unknown_characters_alone(tiny_sd3_model):
    """The tiny vocabularies of Stable Diffusion 3 know ASCII only; one tokenizer that knows a text is enough."""
    with pytest.raises(ValueError, match=r"train\.txt:2: '東京' says nothing to the model.*blank or unknown"):
        check_prompts(tiny_sd3_model, places("a cat", "東京"), 64)
    check_prompts(tiny_sd3_model, places("a cat", "東京 tower"), 64)


def test_a_run_says_which_prompts_are_cut_and_refuses_those_that_say_nothing(small_config, tmp_path):
    from flowgrpo_rc.trainer import FlowGRPOTrainer

    path = tmp_path / "own.txt"
    path.write_text("\n".join(['the text "1"', 'the text "2"', 'the text "3"', "x" * 300]))
    length = "actor_rollout_ref.rollout.pipeline.max_sequence_length=64"
    with pytest.warns(
        UserWarning, match=r"1 of \d+ prompts \(the first: .*own\.txt:4, 300 tokens of which 64 are read"
    ):
        FlowGRPOTrainer(small_config(f"data.train_files={path}", length))
