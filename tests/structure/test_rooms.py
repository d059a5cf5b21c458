"""The page of the architecture lists the rooms, wings and layers that there are."""

from website.rooms import PAGE, page_with_lists


def test_the_lists_of_the_architecture_are_those_of_the_code():
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_lists(page), "python -m website.rooms writes them"
