"""A task whose requests are made by a function."""


def colours():
    """Return questions with two choices each, the first of which is right."""
    for group, (thing, right, wrong) in enumerate((("river", " sees", " qx"), ("tree", " builds", " zz"))):
        for continuation in (right, wrong):
            gold = continuation == right
            yield {
                "task": "colours",
                "group": group,
                "context": f"the {thing}",
                "continuation": continuation,
                "is_gold": gold,
            }
