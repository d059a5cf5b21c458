"""The standard library of the house: errors, processes, logs, quantities, files, devices, and the ranks of a run.

    errors, urls, quantities, terminal   for every room
    process, progress, logs              this process: its rank, signals, streams; how far it has come; what it says
    storage                              files, object stores and the folder of a run
    backend                              device types: the only code that knows them
    distributed                          ranks meet, agree on recipe and code, and exchange values

Its modules are imported by name: this door hands on nothing. Most of them do not import torch, so ``hlat check`` and a
rejected recipe run without it.
"""
