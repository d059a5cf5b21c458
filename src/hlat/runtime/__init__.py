"""Lowest layer of hlat: errors, rank environment, terminal text, URLs; its wings hold the backend and distributed code.

This is the only room that knows the backend. Modules that need torch are imported when a name of theirs is first
used: ``hlat check`` and a rejected recipe run without torch.
"""
