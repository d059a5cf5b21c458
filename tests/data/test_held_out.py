"""A message about validation text names three sources, however many there are."""

from hlat.data.documents import HeldOut, describe_scarce


def test_the_message_about_scarce_validation_text_does_not_grow_with_the_sources() -> None:
    few = [HeldOut(f"/texts/source{number}", 0, 9, 0, 1000) for number in range(2)]
    many = [HeldOut(f"/texts/source{number}", 0, 9, 0, 1000) for number in range(80)]
    short, long = (" ".join(describe_scarce(held, 0.01) or ()) for held in (few, many))
    assert "source0" in short and "source1" in short and "other" not in short
    assert long.count("/texts/") == 6 and "77 other sources alike" in long and len(long) < 700
