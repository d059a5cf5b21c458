"""Manifests: valid by the published schemas, and the commands in their pods make one run with its own exit code."""

import os
import re
import sys

import pytest
import yaml

from hlat.api import submit_kubernetes
from hlat.config import load_recipe
from hlat.hardware import load_catalog
from hlat.launch import HostOptions, KubernetesOptions
from hlat.launch.supervision.agent import HostPlace
from hlat.launch.supervision.self_watch import watching_itself
from hlat.runtime.errors import LaunchError
from tests.support.commands import hlat
from tests.support.launch.pods import DATA, job_of, pod_of, start_pod, write

KINDS = ("job", "jobset", "trainjob")
INSTANCES = [None, *(one.name for one in load_catalog().instances if one.launch.kubernetes)]


@pytest.mark.parametrize("instance", INSTANCES)
def test_plain_manifests_follow_the_schemas_of_kubernetes(recipe_file, instance):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[clusters]'")
    options = {
        "namespace": "team",
        "node_selector": ("zone=a",),
        "resources": ("cpu=4", "memory=8.5Gi", "rdma/ib=1"),
        "labels": ("kueue.x-k8s.io/queue-name=training", "team="),
        "tolerations": ("dedicated=training:NoSchedule", "spot"),
        "changes": ("pod.spec.imagePullSecrets=[{name: registry}]", "pod.spec.serviceAccountName=hlat"),
    }
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
    assert job["backoffLimit"] == 2 * 7, "a failure of the run ends every pod"
    assert [p for p in policy if p] == ([] if kind == "job" else [{"maxRestarts": 0}])


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
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert variables["FI_PROVIDER"] == "tcp" and variables["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert variables["TEXT"] == "$$(HOME) 'x'", "Kubernetes replaces $(NAME), and writes $ for $$"
    assert container["command"][3:] == ["--nproc", "8", "--nodes", "2", "--address", "$(HLAT_POD_ADDRESS)"]
    assert pod_of(found)["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}


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
            environment=("A", "HLAT_POD_ADDRESS=1"),
            options={
                **{"namespace": "A", "resources": ("gpu=x",), "node_selector": ("a",), "labels": ("b",)},
                **{"tolerations": ("c=d:Never",), "changes": ("hostNetwork=true",)},
            },
        )
    text = str(caught.value)
    options = ("--kind", "--namespace", "--volume", "--resource", "--node-selector", "--nodes", "--env A", "--env HLAT")
    for option in (*options, "--label", "--toleration", "--set", "run.dir", "the recipe names 1 path", "--name"):
        assert f"  {option}" in text, option
    assert text.startswith("14 problems:")


def test_the_manifests_are_given_to_kubectl(recipe_file, tmp_path, monkeypatch):
    stub = tmp_path / "bin/kubectl"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat > {tmp_path}/applied; exit $(cat {tmp_path}/code)\n')
    stub.chmod(0o755)
    same = {
        "nodes": 2,
        "nproc": 2,
        "least": 1,
        "name": "mine",
        "grace": 77,
        "program": "my hlat",
        "instance": "p5.48xlarge",
    }
    given = [word for name, value in same.items() for word in (f"--{name}", str(value))]
    words = ["launch", "kubernetes", recipe_file, *DATA, *given, "--env", "A=b"]
    words += ["--image", "hlat:1", "--volume", "shared:/data"]
    printed = hlat(*words, "--dry-run")
    options = KubernetesOptions("hlat:1", volumes=("shared:/data",))
    ours = submit_kubernetes(recipe_file, DATA, options=options, environment={"A": "b"}, dry_run=True, **same)
    assert printed.stdout == ours, "the options of every scheduler arrive"
    (tmp_path / "code").write_text("0")
    environment = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    assert hlat(*words, env=environment).returncode == 0
    assert (tmp_path / "words").read_text() == "apply -f -\n"
    assert (tmp_path / "applied").read_text() == printed.stdout
    (tmp_path / "code").write_text("1")
    failed = hlat(*words, env=environment)
    assert failed.returncode == 2 and "\nerror: kubectl failed" in failed.stderr


@pytest.mark.parametrize("least", [None, 2])
def test_pods_supervise_the_run_together(recipe_file, tmp_path, least):
    """The options in the command, as `hlat train` reads them in each pod: its number is the index of the pod."""
    overrides = ("batch.global_batch=12",)
    found = write(recipe_file, nodes=3, least=least, overrides=overrides)
    program = [sys.executable, "-c", "import os, sys; print(*sys.argv[1:], os.environ['JOB_COMPLETION_INDEX'])"]
    for index in range(3):
        printed = start_pod(found, tmp_path, index, program, f"10.0.0.{index}").communicate()[0].split()
        verb, recipe, *options, number = printed
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert (verb, recipe) == ("train", f"{tmp_path}/recipe.yaml")
        assert given.keys() == {"--nproc", "--nodes", "--address"}
        hosts = HostOptions(given["--nodes"], None, given["--address"])
        place = HostPlace(index, f"10.0.0.{index}", 2)
        assert hosts.resolve(int(given["--nproc"]), {"JOB_COMPLETION_INDEX": number}) == (least or 3, 3, place)
    (alone, *_) = pod_of(write(recipe_file, nodes=1))["containers"]
    assert alone["command"] == ["hlat", "train", "/etc/hlat/recipe.yaml", "--nproc", "2"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_field_is_set_by_its_path(recipe_file, kind):
    """The same words for every kind, whose pods are at different depths."""
    changes = (
        "pod.spec.hostNetwork=true",
        "container.securityContext={runAsUser: 0}",
        "container.volumeMounts.-={name: local, mountPath: /local}",
        "job.spec.ttlSecondsAfterFinished=60",
        r"metadata.annotations.example\.com/cost='1'",
    )
    before, found = write(recipe_file, kind), write(recipe_file, kind, options={"changes": changes})
    pod, container = pod_of(found), pod_of(found)["containers"][0]
    assert pod.pop("hostNetwork") is True
    assert container.pop("securityContext") == {"runAsUser": 0}
    assert container["volumeMounts"].pop() == {"name": "local", "mountPath": "/local"}
    assert job_of(found).pop("ttlSecondsAfterFinished") == 60
    assert found[-1]["metadata"].pop("annotations") == {"example.com/cost": "1"}
    assert found == before, "nothing else has changed"


def test_changes_that_lead_nowhere_are_refused_together(recipe_file):
    wrong = ("container.image.tag=1", "pod.spec.containers.7.image=x", "spec.template.spec.volumes.last={}", "pod.a=[")
    with pytest.raises(LaunchError) as caught:
        write(recipe_file, options={"changes": wrong})
    text = str(caught.value)
    assert text.startswith("4 problems:")
    reasons = ("is a value, it has no field 'tag'", "there is no element 7", "'last' is not the number", "ends within")
    for change, reason in zip(wrong, reasons, strict=True):
        [line] = [line for line in text.splitlines() if f"--set {change}: " in line]
        assert reason in line


def test_runs_of_one_name_do_not_take_each_other_s_place(recipe_file):
    """Another recipe in the same folder has the same job, which Kubernetes refuses to change, and another file."""

    def names(*overrides):
        found = write(recipe_file, "trainjob", overrides=("run.name=same", *overrides))
        assert pod_of(found)["volumes"][0]["configMap"]["name"] == found[0]["metadata"]["name"]
        [job] = {manifest["metadata"]["name"] for manifest in found[1:]}
        assert all(m["metadata"]["labels"]["app.kubernetes.io/instance"] == job for m in found)
        assert all(m["metadata"]["name"].startswith(job) for m in found)
        return job, found[0]["metadata"]["name"]

    assert names() == names()
    assert names()[0] != names("run.dir=/data/other")[0]
    assert names()[0] == names("training.steps=7")[0] and names()[1] != names("training.steps=7")[1]
    given = write(recipe_file, name="mine")
    assert given[1]["metadata"]["name"] == "mine", "a name that is given is taken as it is"


@pytest.mark.parametrize("name", ["Llama.8B_Run", "7b", "x" * 100, "a-" * 30, "x__", "1.5b"])
def test_every_name_of_a_run_makes_names_of_objects(recipe_file, name):
    found = write(recipe_file, overrides=(f"run.name={name!r}",))
    job = found[1]["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job) and len(job) <= 40, "RFC 1035, and room for suffixes"
    assert len(found[0]["metadata"]["name"]) <= 63


def test_paths_that_no_pod_has_are_refused_in_a_few_words(recipe_file):
    sources = ", ".join(f"{{path: /text/{number}}}" for number in range(40))
    many = (f"data.sources=[{sources}]", "data.path=null", "data.tokenizer.path=/data/../elsewhere/tokenizer")
    with pytest.raises(LaunchError) as caught:
        write(recipe_file, overrides=many)
    text = str(caught.value)
    assert "the recipe names 41 paths in no volume of the pods (/data): data.sources.0.path = /text/0, " in text
    assert "and 38 more. Give --volume CLAIM:/PATH" in text and len(text) < 500
    both = ("shared:/data", ":/text", "other:/elsewhere")
    assert write(recipe_file, overrides=many, volumes=both)
    mounted = pod_of(write(recipe_file, overrides=many, volumes=both))["containers"][0]["volumeMounts"]
    assert [each["mountPath"] for each in mounted][2:] == ["/data", "/elsewhere"], "/text is in the image"
    for path in ("s3://bucket/text", "/data/*.jsonl"):
        assert write(recipe_file, overrides=(f"data.path={path}", "data.tokenizer.path=openai-community/gpt2"))
    with pytest.raises(LaunchError, match=r"data.prepared_dir = /prepared: it is in no volume"):
        write(recipe_file, overrides=("data.prepared_dir=/prepared",))


def test_text_that_may_be_prepared_already_is_only_warned_of(recipe_file, caplog):
    write(recipe_file, overrides=("data.path=/text", "data.prepared_dir=/data/prepared"))
    assert "1 path in no volume" in caplog.text and "Nothing is missing if /data/prepared is complete" in caplog.text


def test_a_pod_is_no_best_effort_and_tolerates_the_taint_of_its_devices(recipe_file):
    """By the rule of Kubernetes: a pod without requests and limits of cores and memory is evicted first."""
    resources = pod_of(write(recipe_file))["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": 2, "memory": "8Gi"}}
    options = {
        "resources": ("cpu=96", "memory=900Gi", "rdma/ib=8"),
        "tolerations": ("dedicated=training", "a:NoExecute"),
    }
    pod = pod_of(write(recipe_file, options=options))
    container = pod["containers"][0]
    assert container["resources"] == {"limits": {"cpu": 96, "memory": "900Gi", "rdma/ib": 8}}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod["tolerations"] == [
        {"key": "rdma/ib", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Equal", "value": "training"},
        {"key": "a", "operator": "Exists", "effect": "NoExecute"},
    ]


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
