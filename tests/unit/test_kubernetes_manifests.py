"""deploy/kubernetes fits Kubernetes' own schemas, the programs that it starts, and itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.harness import kubectl as tool
from tests.harness.kubernetes_cluster import BASE, PROVIDE, manifest, manifests
from tests.harness.kubernetes_machines import environment_of, pod_of
from tests.harness.kubernetes_store import STRATEGIC, Object, patched, selector

from megascale_checkpoint.serve import sidecar
from megascale_common.node.addresses import joined
from megascale_common.service import health_probe
from megascale_driver import __main__ as driver
from megascale_driver.platform.kubernetes import __main__ as platform
from megascale_driver.platform.kubernetes.objects import SELECTOR
from megascale_executor.agent import __main__ as agent

pytestmark = pytest.mark.check

# The oldest that is still in wide use, and the newest known here.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
OVERLAY = BASE.parent / "overlays" / "gpu"
KUSTOMIZE_SINCE = 21  # kubectl 1.20 has a kustomize of 2019
WORKLOADS = (("Deployment", "driver"), ("Deployment", "platform"), ("StatefulSet", "node"))
CONTAINERS = (
    ("Deployment", "driver", "driver"),
    ("Deployment", "platform", "platform"),
    ("StatefulSet", "node", "agent"),
    ("StatefulSet", "node", "checkpoint"),
)
PARSERS = {
    "megascale_driver": driver._parser,
    "megascale_driver.platform.kubernetes": platform.parser,
    "megascale_executor.agent": agent.parser,
    "megascale_checkpoint.serve.sidecar": sidecar.parser,
    "megascale_common.service.health_probe": health_probe.parser,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_fits_the_schema(version: str) -> None:
    found = manifests()
    assert len(found) >= 18
    for each in found:
        kubernetes_validate.validate(each, version, strict=True)


def test_the_folder_is_listed_whole() -> None:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    files = {file.name for file in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert sorted(listed) == sorted(files)


def test_a_field_that_does_not_exist_is_found() -> None:
    wrong = manifest("StatefulSet", "node")
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 30
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def overlaid() -> dict[tuple[str, str], Object]:
    """The base with the overlay's patches and images, as the API's own merge makes it."""
    kustomization = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
    found = {_named(each): each for each in manifests()}
    for patch in kustomization["patches"]:
        given = yaml.safe_load((OVERLAY / patch["path"]).read_text())
        found[_named(given)] = patched(found[_named(given)], given, STRATEGIC)
    images = {each["name"]: each for each in kustomization["images"]}
    for each in found.values():
        if "template" in each.get("spec", {}):
            for container in _containers(each).values():
                new = images[container["image"]]
                container["image"] = f"{new['newName']}:{new['newTag']}"
    return found


def _named(found: Object) -> tuple[str, str]:
    return found["kind"], found["metadata"]["name"]


def test_the_overlay_for_gpus() -> None:
    found = overlaid()
    for version in VERSIONS:
        for each in found.values():
            kubernetes_validate.validate(each, version, strict=True)
    nodes = found["StatefulSet", "megascale-node"]
    assert nodes["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "megascale"
    container = _containers(nodes)["agent"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    before = _containers(manifest("StatefulSet", "node"))
    assert container["command"] == before["agent"]["command"]
    assert container["image"] == "registry.example.org/megascale-node:0.1"
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    settings = found["ConfigMap", "megascale"]["data"]
    assert (settings["MEGASCALE_DEVICE"], settings["MEGASCALE_CLUSTER"]) == ("cuda", "main")


@pytest.mark.skipif(tool.minor_version() < KUSTOMIZE_SINCE, reason="needs kubectl of 1.21 or later")
def test_kubectl_makes_the_same_of_the_overlay() -> None:
    made = {_named(each): each for each in yaml.safe_load_all(tool.kustomized(OVERLAY))}
    ours = overlaid()
    for found in (made, ours):  # volumes have names, and no order
        spec = found["StatefulSet", "megascale-node"]["spec"]["template"]["spec"]
        spec["volumes"].sort(key=lambda volume: volume["name"])
    assert made == ours


def test_a_component_lets_the_platform_add_pods_of_the_nodes_set_alone(tmp_path: Path) -> None:
    role, binding, settings = manifests(PROVIDE)
    for version in VERSIONS:
        for each in (role, binding, settings):
            kubernetes_validate.validate(each, version, strict=True)
    (rule,) = role["rules"]
    nodes = manifest("StatefulSet", "node")["metadata"]["name"]
    assert rule["resourceNames"] == [nodes] == [platform.parser().get_default("stateful_set")]
    assert _settings()["MEGASCALE_PROVIDE_UP_TO"] == "0", "the base alone adds none"
    assert settings["data"] == {"MEGASCALE_PROVIDE_UP_TO": "16"}
    if tool.minor_version() >= KUSTOMIZE_SINCE:
        overlay = {
            "resources": [os.path.relpath(BASE, tmp_path)],
            "components": [os.path.relpath(PROVIDE, tmp_path)],
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        made = {_named(each): each for each in yaml.safe_load_all(tool.kustomized(tmp_path))}
        assert made["Role", "megascale-provide"]["rules"] == [rule]
        data = made["ConfigMap", "megascale"]["data"]
        assert data == {**_settings(), **settings["data"]}


def _containers(workload: Object) -> dict[str, Any]:
    return {each["name"]: each for each in workload["spec"]["template"]["spec"]["containers"]}


def test_the_containers_are_all_tested() -> None:
    found = [(*which, name) for which in WORKLOADS for name in _containers(manifest(*which))]
    assert found == list(CONTAINERS)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program `python` that prints its arguments."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    return program


def _settings() -> dict[str, str]:
    (found,) = [each for each in manifests() if each["kind"] == "ConfigMap"]
    return dict(found["data"])


@pytest.mark.parametrize("pod_ip", ["10.1.2.3", "fd00::1:7"])
@pytest.mark.parametrize(("kind", "name", "container_name"), CONTAINERS)
def test_its_programs_take_the_options(
    kind: str, name: str, container_name: str, pod_ip: str, python: Path, tmp_path: Path
) -> None:
    workload = manifest(kind, name)
    pod = pod_of(workload["spec"]["template"], f"megascale-{name}-0")
    pod["metadata"]["namespace"] = "megascale"
    container = _containers(workload)[container_name]
    (tmp_path / "topology").write_text("switch=s1,host=m1")
    environment = {**_settings(), **environment_of(container, pod, pod_ip)}
    [shell, flags, script, word] = container["command"]
    script = script.replace("/etc/megascale/pod", str(tmp_path))
    done = subprocess.run(
        [shell, flags + "u", script, word, "--version"],  # u: no variable that is not set
        env={**environment, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    [minus_m, module, *options] = json.loads(done.stdout)
    assert minus_m == "-m" and options.pop() == "--version"
    found = vars(parsed(module, options))
    assert found["tls_ca"].name == "ca.crt"
    if container_name == "checkpoint":
        agents = _containers(workload)["agent"]["command"][2]
        assert f"--checkpoint-sidecar {found['socket']}" in agents
        return
    assert found["token_file"] == Path("/etc/megascale/token/token")
    if name == "driver":
        # The names that CoreDNS answers for pods: dots, or the colons of IPv6, as dashes.
        dashed = {"10.1.2.3": "10-1-2-3", "fd00::1:7": "fd00--1-7"}[pod_ip]
        assert found["bind"] == f"{dashed}.megascale.pod.cluster.local:7700"
        assert found["metrics_bind"] == f"{dashed}.megascale.pod.cluster.local:7790"
    if name == "node":
        assert found["metrics_bind"] == joined(pod_ip, 7790)
        assert found["node"] == "megascale-node-0"
        assert found["host"] == "megascale-node-0.megascale-node.megascale.svc.cluster.local"
        assert found["topology"] == ["switch=s1,host=m1"]


@pytest.mark.parametrize(("kind", "name", "container_name"), CONTAINERS)
def test_its_probes_ask_by_grpc(kind: str, name: str, container_name: str) -> None:
    container = _containers(manifest(kind, name))[container_name]
    probes = [container[key] for key in ("readinessProbe", "livenessProbe") if key in container]
    assert bool(probes) == (container_name in ("driver", "agent"))
    for probe in probes:
        [program, minus_m, module, *options] = probe["exec"]["command"]
        assert (program, minus_m) == ("python", "-m")
        found = parsed(module, options)
        assert f"--address-file {found.address_file}" in container["command"][2]


def parsed(module: str, options: list[str]) -> Any:
    """The options as the program reads them; it exits with 2 for one that it does not have."""
    made: ArgumentParser = PARSERS[module]()
    return made.parse_args(options)


def mounts(workload: Object, container_name: str) -> Iterator[tuple[str, Object]]:
    """Where in the container each volume is."""
    spec = workload["spec"]["template"]["spec"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    for each in _containers(workload)[container_name]["volumeMounts"]:
        yield each["mountPath"], volumes[each["name"]]


@pytest.mark.parametrize(("kind", "name", "container_name"), CONTAINERS)
def test_every_file_that_is_named_is_mounted(kind: str, name: str, container_name: str) -> None:
    workload = manifest(kind, name)
    script = _containers(workload)[container_name]["command"][2]
    folders = [path for path, _ in mounts(workload, container_name)]
    for path in re.findall(r"/(?:etc|var/lib|run)/megascale[\w./-]*", script):
        assert any(path == folder or path.startswith(f"{folder}/") for folder in folders), path
    uris = [
        volume["csi"]["volumeAttributes"]["csi.cert-manager.io/uri-sans"].rsplit("/", 2)[1]
        for _, volume in mounts(workload, container_name)
        if "csi" in volume
    ]
    roles = {"platform": "operator", "agent": "executor"}
    assert uris == [roles.get(container_name, container_name)], "each has its own role alone"


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_every_volume_is_mounted(kind: str, name: str) -> None:
    workload = manifest(kind, name)
    mounted = {
        volume["name"] for each in _containers(workload) for _, volume in mounts(workload, each)
    }
    assert mounted == {each["name"] for each in workload["spec"]["template"]["spec"]["volumes"]}


def test_the_daemon_finds_the_agents_files_where_they_are() -> None:
    nodes = manifest("StatefulSet", "node")
    agent_has, daemon_has = (
        {path: volume["name"] for path, volume in mounts(nodes, name)}
        for name in ("agent", "checkpoint")
    )
    shared = ("/var/lib/megascale", "/run/megascale", "/dev/shm", "/tmp", "/etc/megascale/token")
    for path in shared:
        assert agent_has[path] == daemon_has[path]


def test_every_setting_is_used() -> None:
    scripts = "".join(
        each["command"][2] for which in WORKLOADS for each in _containers(manifest(*which)).values()
    )
    for name in _settings():
        assert re.search(rf"\$\{{?{name}\b", scripts), name


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_pods_have_no_more_rights_than_they_need(kind: str, name: str) -> None:
    spec = manifest(kind, name)["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is (name == "platform")
    assert spec["serviceAccountName"] == f"megascale-{name}"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in _containers(manifest(kind, name)).values():
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    accounts = [
        subject["name"]
        for each in manifests()
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in each["subjects"]
    ]
    assert (f"megascale-{name}" in accounts) == (name == "platform")


def test_no_rule_of_access_has_a_wildcard_or_a_secret() -> None:
    for each in manifests():
        for rule in each.get("rules", ()):
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not words & {"*", "secrets", "pods/exec", "escalate", "impersonate", "bind"}


def test_selectors_choose_pods_that_there_are() -> None:
    pods = [pod_of(manifest(*each)["spec"]["template"], "x") for each in WORKLOADS]

    def chosen(labels: dict[str, str]) -> int:
        words = ",".join(f"{key}={value}" for key, value in labels.items())
        return sum(map(selector(words, ""), pods))

    for each in manifests():
        spec = each.get("spec", {})
        match each["kind"]:
            case "Service":
                assert chosen(spec["selector"]) == 1, each
            case "PodDisruptionBudget" | "Deployment" | "StatefulSet":
                assert chosen(spec["selector"]["matchLabels"]) == 1, each
            case "NetworkPolicy":
                whom = spec["podSelector"]
                if "matchLabels" in whom:
                    assert chosen(whom["matchLabels"]) in (1, 2), each
                for rule in spec.get("ingress", ()):
                    named = [port["port"] for port in rule.get("ports", ())]
                    assert all(name in _port_names() for name in named), each


def _port_names() -> set[str]:
    containers = [each for which in WORKLOADS for each in _containers(manifest(*which)).values()]
    return {port["name"] for each in containers for port in each.get("ports", ())}


def test_the_switch_label_of_the_gpu_overlay_is_the_one_for_kueue() -> None:
    settings = yaml.safe_load((OVERLAY / "settings.yaml").read_text())["data"]
    node = yaml.safe_load((OVERLAY / "node.yaml").read_text())
    wanted = node["spec"]["template"]["metadata"]["annotations"]
    topology = "kueue.x-k8s.io/podset-preferred-topology"
    assert wanted[topology] == settings["MEGASCALE_SWITCH_LABEL"]


def test_the_platform_follows_the_pods_of_the_statefulset() -> None:
    labels = manifest("StatefulSet", "node")["spec"]["template"]["metadata"]["labels"]
    assert selector(SELECTOR, "")({"metadata": {"labels": labels}})
