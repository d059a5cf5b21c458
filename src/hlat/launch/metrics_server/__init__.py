"""Server of a run's metrics for Prometheus, and of its health for probes, in a process of its own.

    supervisor, or a machine's first rank --binds the port, starts--> server process
    heartbeats, goodput.json, metrics.jsonl, events.jsonl --RunObserver--> RunObservation
    RunObservation --> /metrics, /healthz, /readyz

The server only reads files, so nothing that it does can disturb training, and it answers while a rank hangs in a
library. It ends with the process that started it.
"""
