"""Code that runs inside the sandbox, with the standard library only: ``python -I -S``, where hlat is not installed.

judge (confines itself, forks) --calls--> program (what the model wrote) --values--> judge (the tests) --> verdict
"""
