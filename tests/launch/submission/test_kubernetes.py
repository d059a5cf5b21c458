"""Manifests: valid by the published schemas, and the commands in their pods make one run with its own exit code."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from hlat.config import load_recipe
from hlat.hardware import load_catalog
from hlat.launch.submission import KubernetesOptions, RunRequest, manifests, manifests_yaml
from hlat.launch.unsupervised import watching_itself
from hlat.runtime import LaunchError
from tests.support.commands import hlat

KINDS = ("job", "jobset", "trainjob")
INSTANCES = [None, *(one.name for one in load_catalog().instances if one.launch.kubernetes)]
DATA = ("data.path=/data/text", "run.dir=/data/run", "batch.micro_batch=1")


def write(recipe_file, kind="job", *, overrides=(), volumes=("shared:/data",), options=None, **request):
    """Manifests of the tiny recipe, as kubectl would read them."""
    request = {"nodes": 2, "nproc": 2, **request}
    asked = RunRequest(str(recipe_file), (*DATA, *overrides), **request)
    chosen = KubernetesOptions("registry/hlat:1", kind, volumes=volumes, **(options or {}))
    return list(yaml.safe_load_all(manifests_yaml(manifests(asked, chosen))))


def job_of(found):
    """The Job in the last manifest or the one before."""
    by_kind = {manifest["kind"]: manifest.get("spec", {}) for manifest in found}
    runtime = by_kind.get("TrainingRuntime", {}).get("template", {}).get("spec")
    sets = by_kind.get("JobSet", runtime)
    return by_kind["Job"] if sets is None else sets["replicatedJobs"][0]["template"]["spec"]


def pod_of(found):
    """The pod in the manifests."""
    return job_of(found)["template"]["spec"]


@pytest.mark.parametrize("instance", INSTANCES)
def test_plain_manifests_follow_the_schemas_of_kubernetes(recipe_file, instance):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[clusters]'")
    options = {"namespace": "team", "node_selector": ("zone=a",), "resources": ("cpu=4",)}
    nproc = None if instance else 2
    overrides = ("batch.global_batch=1024",)
    for kind in KINDS:
        found = write(recipe_file, kind, instance=instance, nproc=nproc, options=options, overrides=overrides)
        bare = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_of(found)}
        known = [manifest for manifest in found if "." not in manifest["apiVersion"]]
        for manifest in [*known, bare]:
            kubernetes_validate.validate(manifest, "1.34", strict=True)
    wrong = write(recipe_file)[-1]
    wrong["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


def test_job_sets_and_train_jobs_follow_the_models_of_kubeflow(recipe_file):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[clusters]'")
    (job_set,) = write(recipe_file, "jobset")[1:]
    runtime, train_job = write(recipe_file, "trainjob", options={"namespace": "team"})[1:]
    for model, manifest in [
        (models.JobsetV1alpha2JobSetSpec, job_set["spec"]),
        (models.TrainerV1alpha1TrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, train_job),
    ]:
        # Unknown fields are accepted and dropped, so the model has to give back all of them.
        assert model.from_dict(manifest).to_dict() == manifest
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    # Names that Kubeflow Trainer looks for: the replicated job, its label, and the container.
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert group["name"] == pod_of([runtime])["containers"][0]["name"] == "node"
    assert group["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes_decide_what_the_job_does(recipe_file, kind):
    """By the rules of podFailurePolicy: the first that fits decides, and a pod that fits none counts as a failure."""
    found = write(recipe_file, kind, overrides=("recovery.restarts=7",))
    job = job_of(found)
    rules = [
        (rule["action"], rule["onExitCodes"]) for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]

    def action(code):
        return next((action for action, test in rules if code in test["values"]), "Count")

    assert {code: action(code) for code in (1, 2, 3, 4, 5, 75, 137)} == {
        **dict.fromkeys((1, 3, 5, 137), "Count"),
        **dict.fromkeys((2, 4), "FailJob"),
        75: "Ignore",
    }
    assert {test["containerName"] for _, test in rules} == {pod_of(found)["containers"][0]["name"]}
    assert pod_of(found)["restartPolicy"] == "Never", "podFailurePolicy requires it"
    policy = [m["spec"].get("template", m)["spec"].get("failurePolicy") for m in found if m["kind"] != "ConfigMap"]
    allowed = job["backoffLimit"] / 2 if kind == "job" else next(p for p in policy if p)["maxRestarts"]
    assert allowed == 7


def test_a_pod_takes_the_accelerators_of_its_machine(recipe_file):
    overrides = ("batch.global_batch=1024",)
    found = write(
        recipe_file,
        nproc=None,
        instance="p5.48xlarge",
        overrides=overrides,
        environment=("FI_PROVIDER=tcp", "TEXT=$(HOME) 'x'"),
        options={"resources": ("vpc.amazonaws.com/efa=2",)},
    )
    container = pod_of(found)["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 2}
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables["FI_PROVIDER"] == "tcp" and variables["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert variables["TEXT"] == "$$(HOME) 'x'", "Kubernetes replaces $(NAME), and writes $ for $$"
    assert variables["WORLD_SIZE"] == "16" and variables["MASTER_ADDR"] == "tiny-0.tiny"
    assert pod_of(found)["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert pod_of(found)["subdomain"] == found[1]["metadata"]["name"] == "tiny"


def test_the_manifests_hold_the_complete_recipe(recipe_file, tmp_path):
    files = write(recipe_file, overrides=("optimizer.lr=1e-5", "training.steps=7"))[0]["data"]
    (tmp_path / "mounted.yaml").write_text(files["recipe.yaml"])
    probes = "tracking.prometheus={port: 9464, address: 0.0.0.0}"
    expected = load_recipe(recipe_file, [*DATA, "optimizer.lr=1e-5", "training.steps=7", probes])
    assert load_recipe(tmp_path / "mounted.yaml") == expected


def test_every_problem_is_reported_at_once(recipe_file):
    with pytest.raises(LaunchError) as caught:
        write(
            recipe_file,
            "pod",
            name="Not a label",
            nodes=0,
            volumes=("/data",),
            environment=("A", "RANK=1"),
            options={"namespace": "A", "resources": ("gpu=x",), "node_selector": ("a",)},
        )
    text = str(caught.value)
    options = ("--kind", "--namespace", "--volume", "--resource", "--node-selector", "--nodes", "--env A", "--env RANK")
    for option in (*options, "run.dir", "--name"):
        assert f"  {option}" in text, option
    assert text.startswith("10 problems:")


def test_the_manifests_are_given_to_kubectl(recipe_file, tmp_path, monkeypatch):
    stub = tmp_path / "bin/kubectl"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat > {tmp_path}/applied; exit $(cat {tmp_path}/code)\n')
    stub.chmod(0o755)
    words = [
        "launch",
        "kubernetes",
        recipe_file,
        *DATA,
        "--nodes",
        "1",
        "--image",
        "hlat:1",
        "--volume",
        "shared:/data",
    ]
    printed = hlat(*words, "--dry-run")
    (tmp_path / "code").write_text("0")
    environment = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    assert hlat(*words, env=environment).returncode == 0
    assert (tmp_path / "words").read_text() == "apply -f -\n"
    assert (tmp_path / "applied").read_text() == printed.stdout
    (tmp_path / "code").write_text("1")
    failed = hlat(*words, env=environment)
    assert failed.returncode == 2 and failed.stderr.startswith("error: kubectl failed")


def start_pod(found, folder, index, program, **environment):
    """Start the container of a pod as a process, with its files and variables."""
    for name, text in found[0]["data"].items():
        (folder / name).write_text(text)
    container = pod_of(found)["containers"][0]
    command = [word.replace("/etc/hlat", str(folder)).replace("$$", "$") for word in container["command"]]
    at = command.index("hlat")
    variables = {entry["name"]: entry["value"].replace("$$", "$") for entry in container["env"]}
    return subprocess.Popen(
        [*command[:at], *program, *command[at + 1 :]],
        env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


STUB = """
import os, signal, sys, time
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR")
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())  # one write: lines stay whole
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
code = os.environ["CODES"].split(",")[int(os.environ["LOCAL_RANK"])]
if code == "wait":
    time.sleep(600)
sys.exit(int(code))
"""


@pytest.mark.parametrize(
    ("codes", "expected"), [("0,0", 0), ("2,2", 2), ("1,4", 4), ("5,1", 5), ("75,1", 75), ("3,wait", 137)]
)
def test_a_pod_ends_with_the_exit_code_of_its_run(recipe_file, tmp_path, codes, expected):
    found = write(recipe_file, grace=1)  # so long for the process that waits
    process = start_pod(found, tmp_path, 1, [sys.executable, "-c", STUB], CODES=codes)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == expected
    assert sorted(printed.splitlines()[:2]) == ["2 0 1 4 tiny-0.tiny", "3 1 1 4 tiny-0.tiny"]


def test_a_pod_that_is_ended_lets_its_processes_save(recipe_file, tmp_path):
    process = start_pod(write(recipe_file), tmp_path, 0, [sys.executable, "-c", STUB], CODES="wait,wait")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    time.sleep(0.5)  # until both have their handlers
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75


@pytest.mark.parametrize("kind", KINDS)
def test_probes_ask_where_the_run_answers(recipe_file, kind):
    """Paths are those of the metrics server; the port's name leads to the port of the recipe in the ConfigMap."""
    for overrides, port in [((), 9464), (("tracking.prometheus={port: 9999, address: 10.0.0.1}",), 9999)]:
        found = write(recipe_file, kind, overrides=overrides, grace=100)
        container = pod_of(found)["containers"][0]
        served = yaml.safe_load(found[0]["data"]["recipe.yaml"])["tracking"]["prometheus"]
        assert served == {"port": port, "address": "10.0.0.1" if overrides else "0.0.0.0"}
        assert container["ports"] == [{"name": "metrics", "containerPort": port, "protocol": "TCP"}]
        probes = {name: container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert {name: probe["httpGet"] for name, probe in probes.items()} == {
            "startupProbe": {"path": "/healthz", "port": "metrics"},
            "livenessProbe": {"path": "/healthz", "port": "metrics"},
            "readinessProbe": {"path": "/readyz", "port": "metrics"},
        }
        lasts = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
        # Two minutes for the ranks to find a hang, and the grace that others have when the process that serves ended.
        assert lasts == {"startupProbe": 1800, "livenessProbe": 220, "readinessProbe": 20}
        assert all(probe["timeoutSeconds"] <= probe["periodSeconds"] for probe in probes.values())


def test_probes_that_would_get_no_answer_are_refused(recipe_file):
    loopback = ("tracking.prometheus.port=0",)  # its address is 127.0.0.1 by default
    with pytest.raises(LaunchError) as caught:
        write(recipe_file, overrides=loopback)
    assert str(caught.value).startswith("2 problems:")
    assert "tracking.prometheus.address = 127.0.0.1: " in str(caught.value) and "port = 0: " in str(caught.value)
    for overrides in (loopback, ()):
        found = write(recipe_file, overrides=overrides, options={"probes": False})
        assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & set(pod_of(found)["containers"][0])
        served = yaml.safe_load(found[0]["data"]["recipe.yaml"])["tracking"]["prometheus"]
        assert served == ({"port": 0, "address": "127.0.0.1"} if overrides else None)


def answer(port, path):
    """Status of an answer, as a probe gets it; None if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as got:
            return got.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
def test_a_pod_answers_its_probes_while_it_runs(recipe_file, corpus, tmp_path):
    port = free_port()
    served = f"tracking.prometheus={{port: {port}, address: 0.0.0.0}}"
    overrides = (f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", "training.steps=20", served)
    found = write(recipe_file, overrides=overrides, volumes=(f"shared:{tmp_path}",), nodes=1)
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    process = start_pod(found, tmp_path, 0, [sys.executable, "-m", "hlat"], **own)
    seen = {"/healthz": set(), "/readyz": set()}
    while process.poll() is None:
        for path, answers in seen.items():
            answers.add(answer(port, path))
        time.sleep(0.05)
    assert process.returncode == 0, process.communicate()[0]
    assert seen["/healthz"] == {None, 200}, "never unhealthy, from the first answer to the last"
    assert {200, 503} <= seen["/readyz"], "not ready before it trains"


@pytest.mark.parametrize(("rank", "local", "is_served"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_the_first_rank_of_each_machine_serves(recipe_file, tmp_path, monkeypatch, rank, local, is_served):
    place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local, "GROUP_RANK": rank // 2, "MASTER_PORT": 1}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    overrides = (*DATA[::2], f"run.dir={tmp_path}", "tracking.prometheus.port=0", "recovery.hang_seconds=null")
    said = []
    with watching_itself(load_recipe(recipe_file, overrides), said.append):
        pass
    assert bool(said) == is_served


@pytest.mark.slow
def test_two_pods_are_one_run(recipe_file, corpus, tmp_path):
    """The pods' containers as processes of this machine, whose loopback address stands for the name of the first.

    They have no probes: both would ask the same port, which pods have for themselves.
    """
    folder = tmp_path / "shared"
    overrides = (f"data.path={corpus}", f"run.dir={folder / 'run'}", "training.steps=10", "tracking.console=plain")
    found = write(recipe_file, overrides=overrides, volumes=(f"shared:{folder}",), nproc=1, options={"probes": False})
    program = [sys.executable, "-m", "hlat"]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    pods = []
    for index in range(2):
        files = tmp_path / str(index)
        files.mkdir()
        pods.append(start_pod(found, files, index, program, **own))
    printed = [process.communicate(timeout=300)[0] for process in pods]
    assert [process.returncode for process in pods] == [0, 0], printed
    lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 10
