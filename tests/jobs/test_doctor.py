"""The doctor: what it finds, and that it ends when a rank does not come."""

import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshpar import LaunchError, MeshSpec
from meshpar.forecasting.hardware import Hardware
from meshpar.launchers.agent.failures import exit_code
from meshpar.launchers.doctor import devices as devices_module
from meshpar.launchers.doctor import examine as examine_module
from meshpar.launchers.doctor.checks import all_findings, placement_findings, price_of_sharding, spans
from meshpar.launchers.doctor.examine import Folder, _folder_findings, _leave_token, _looked, collect, meet
from tests.support.hosts import Hosts, Unavailable
from tests.support.patience import patient

MESHPAR = [sys.executable, "-m", "meshpar.launchers"]


def healthy(ranks: int = 4, hosts: int = 2) -> list[dict[str, Any]]:
    """Facts of a cluster where nothing is wrong."""
    facts = []
    for rank in range(ranks):
        host = rank * hosts // ranks
        facts.append({
            "rank": rank, "local_rank": rank % (ranks // hosts), "ranks_per_node": ranks // hosts, "host": f"n{host + 1}", "pid": 100 + rank,
            "device": {"name": f"cuda:{rank % (ranks // hosts)}", "kind": "H100", "id": f"GPU-{rank}", "memory": 85e9},
            "versions": {"python": "3.11", "torch": "2.13", "meshpar": "0.1", "nccl": "2.27", "driver": "580"},
            "settings": {"NCCL_SOCKET_IFNAME": "eth"}, "visible": {"CUDA_VISIBLE_DEVICES": str(rank % (ranks // hosts))},
            "interfaces": {
                "lo": {"up": True, "loopback": True, "address": "127.0.0.1"},
                "eth0": {"up": True, "loopback": False, "address": f"10.0.0.{host}"},
            },
            "address": f"10.0.0.{host}",
            "infiniband": [{"port": "mlx5_0/1", "state": "4: ACTIVE", "rate": "400 Gb/sec"}],
            "clock": 1000.0, "locked_memory": -1, "open_files": 65536, "shm": {"total": 2**34, "free": 2**34},
        })  # fmt: skip
    return facts


def broken(change: Callable[[list[dict[str, Any]]], None]) -> list[str]:
    facts = copy.deepcopy(healthy())
    change(facts)
    return [str(finding) for finding in all_findings(facts)]


def test_a_healthy_cluster_has_no_findings() -> None:
    assert all_findings(healthy()) == []


@pytest.mark.parametrize(
    ("ranks", "limit", "enough"), [(16, 1024, True), (32, 1024, False), (1024, 4096, False), (8192, 65536, True)]
)
def test_the_limit_of_open_files_grows_with_the_ranks(ranks: int, limit: int, enough: bool) -> None:
    facts = [fact | {"open_files": limit} for fact in healthy(ranks, ranks // 8)]
    found = [finding.do for finding in all_findings(facts)]
    assert found == ([] if enough else ["raise it: ulimit -n 65536"])


def on_second_host(key: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(facts: list[dict[str, Any]]) -> None:
        for fact in facts[2:]:
            fact[key] = value

    return change


def setting(name: str, value: str, ranks: slice = slice(None)) -> Callable[[list[dict[str, Any]]], None]:
    def change(facts: list[dict[str, Any]]) -> None:
        for fact in facts[ranks]:
            fact["settings"][name] = value

    return change


H200 = {"name": "cuda:0", "kind": "H200", "id": None, "memory": 1}
DOWN = [{"port": "mlx5_0/1", "state": "1: DOWN", "rate": "400 Gb/sec"}]
SLOW = [{"port": "mlx5_0/1", "state": "4: ACTIVE", "rate": "100 Gb/sec"}]


@pytest.mark.parametrize(
    ("change", "what", "where", "do"),
    [
        (on_second_host("versions", {**healthy()[0]["versions"], "nccl": "2.20"}), "versions of nccl differ", "2.20 on ranks 2, 3 (n2)", "install the same"),
        (on_second_host("versions", {**healthy()[0]["versions"], "torch": "2.11"}), "versions of torch differ", "2.13 on ranks 0, 1 (n1)", "install the same"),
        (on_second_host("device", H200), "devices differ", "H200 on ranks 2, 3 (n2)", "one kind"),
        (lambda facts: facts[1]["device"].update(id="GPU-0"), "2 ranks share one device of n1", "ranks 0, 1 (n1)", "--nproc"),
        (setting("NCCL_DEBUG", "INFO", slice(2, 4)), "NCCL_DEBUG differs", "unset on ranks 0, 1 (n1); INFO on ranks 2, 3 (n2)", "set the same value"),
        (setting("UCX_TLS", "tcp", slice(2, 4)), "UCX_TLS differs", "unset on ranks 0, 1 (n1); tcp on ranks 2, 3 (n2)", "set the same value"),
        (on_second_host("visible", {"CUDA_VISIBLE_DEVICES": "7"}), "CUDA_VISIBLE_DEVICES differs between hosts", "n1: 0; 1, n2: 7; 7", "the same devices"),
        (on_second_host("open_files", 256), "the limit of open files is low", "n2: 256", "ulimit -n"),
        (setting("GLOO_SOCKET_IFNAME", "ib9"), "GLOO_SOCKET_IFNAME=ib9 names no interface", "n1, which has eth0, lo", "set it to one of these"),
        (setting("NCCL_SOCKET_IFNAME", "lo"), "is the loopback interface", "n1", "set it to one that does: eth0"),
        (setting("NCCL_SOCKET_IFNAME", "^eth"), "is the loopback interface", "n1", "eth0"),
        (lambda facts: facts[0]["interfaces"]["eth0"].update(up=False), "NCCL_SOCKET_IFNAME=eth is down", "n1", "bring it up"),
        (on_second_host("address", "127.0.1.1"), "the host's own name resolves to 127.0.1.1", "n2", "GLOO_SOCKET_IFNAME"),
        (on_second_host("address", None), "the host's own name has no address", "n2", "/etc/hosts"),
        (on_second_host("infiniband", DOWN), "not active: mlx5_0/1", "n2", "ibstat"),
        (on_second_host("infiniband", SLOW), "InfiniBand ports differ", "mlx5_0/1 100 Gb/sec on rank 2 (n2)", "with the same links"),
        (on_second_host("clock", 1009.0), "clocks are 9.0 s apart", "n", "chrony"),
        (on_second_host("locked_memory", 65536), "locked memory is limited", "n2: 0.00 GiB", "ulimit -l unlimited"),
        (on_second_host("shm", {"total": 2**26, "free": 2**26}), "little free space in /dev/shm", "n2: 0.06 GiB free", "--shm-size"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_where_and_what_to_do(change: Any, what: str, where: str, do: str) -> None:
    (first, *_) = broken(change)
    assert what in first and where in first.partition("where:")[2] and do in first.partition("do:")[2]


def test_facts_of_this_machine_are_plain_data() -> None:
    facts = json.loads(json.dumps(collect(torch.device("cpu"))))
    assert facts["interfaces"]["lo"]["loopback"] and facts["interfaces"]["lo"]["address"] == "127.0.0.1"
    assert facts["versions"]["torch"] == torch.__version__


ORDER, IN_TURN = ["n1", "n1", "n2", "n2"], ["n1", "n2", "n1", "n2"]


def test_an_axis_that_should_be_inside_a_host_is_found_from_the_placement() -> None:
    hybrid = MeshSpec("dp_replicate=2,dp_shard=2")
    assert list(placement_findings(hybrid, ORDER)) == []
    (found,) = placement_findings(hybrid, IN_TURN)
    assert found.what == "axis dp_shard (size 2) should be inside a host and spans 2"
    assert found.where == "2 of 2 groups, such as ranks 0 (n1), 1 (n2)"
    assert "--node-rank in the order of the hosts" in found.do
    assert [span.most for span in spans(hybrid, ORDER)] == [2, 1]


def test_shards_over_all_ranks_are_a_choice_with_a_price() -> None:
    assert list(placement_findings(MeshSpec("dp_shard=4"), ORDER)) == []
    note = price_of_sharding(MeshSpec("dp_shard=4"), ORDER)
    assert note is not None and "dp_replicate=2,dp_shard=2 keeps all-gathers inside a host" in note
    assert price_of_sharding(MeshSpec("dp_replicate=2,dp_shard=2"), ORDER) is None


def test_a_call_that_is_held_up_does_not_end_the_growth_of_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def timed(seconds_of: Callable[[int, int], float]) -> tuple[int, float]:
        def run(prepared: Any, device: torch.device) -> float:
            calls.append(prepared.args[0].nbytes)
            return seconds_of(calls[-1], calls.count(calls[-1]))

        calls.clear()
        monkeypatch.setattr(devices_module, "_timed", run)
        monkeypatch.setattr(devices_module, "_slowest", lambda seconds, device: seconds)
        rate = devices_module._gathered_rate(None, 2, torch.device("cpu"))  # type: ignore[arg-type]
        return calls[-1], rate

    fast, slow = 1e9, 1e6
    assert timed(lambda size, call: size / 2 / fast) == (1 << 24, pytest.approx(fast))
    # two of three are held up
    assert timed(lambda size, call: 0.5 if call % 3 else size / 2 / fast) == (1 << 24, pytest.approx(fast))
    # a slow link is not given 16 MiB
    assert timed(lambda size, call: size / 2 / slow) == (1 << 18, pytest.approx(slow))


def test_a_slow_file_system_is_no_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, met = [1000.0], []

    def leave(path: Path) -> dict[str, str]:
        clock[0] += 60.0
        return {"name": "x"}

    class Alone:
        member = 0

        def gather(self, name: str, value: Any) -> list[Any]:
            met.append(value)
            return [value]

        def part(self) -> None: ...

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(examine_module, "_leave_token", leave)
    monkeypatch.setattr(examine_module.time, "time", lambda: clock[0])
    examine_module.examine(Alone(), torch.device("cpu"), Folder(path=tmp_path))  # type: ignore[arg-type]
    assert met[1]["time"] == 1000.0


def test_a_checkpoint_folder_that_is_not_shared_or_not_writable_or_full_is_found(tmp_path: Path) -> None:
    token = _leave_token(tmp_path / "here")
    good = _looked(tmp_path / "here", token)
    facts = healthy()
    folder = Folder(path=tmp_path / "here")
    assert list(_folder_findings(facts, folder, token, [good, None, good, None])) == []
    (tmp_path / "elsewhere").mkdir()
    apart = _looked(tmp_path / "elsewhere", token)
    (found,) = _folder_findings(facts, folder, token, [good, None, apart, None])
    assert "is not shared" in found.what and found.where == "n2"
    (tmp_path / "file").write_text("")
    failed = _looked(tmp_path / "file", token)
    (found,) = _folder_findings(facts, folder, token, [good, None, failed, None])
    assert "cannot be written" in found.what and found.where.startswith("n2: ")
    (found,) = _folder_findings(facts, Folder(path=tmp_path, bytes=2**60), token, [good, None, good, None])
    assert "too little free space" in found.what


class Nvml(SimpleNamespace):
    """A management library of one device; what it lacks, as a device may, raises."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_NVLINK_MAX_LINKS = 1, 0, 4

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            if name not in self.answers:
                raise self.NVMLError(name)
            return self.answers[name]

        return ask


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ({}, None),
        ({"nvmlDeviceGetTotalEccErrors": 3}, "uncorrected memory errors"),
        ({"nvmlDeviceGetRemappedRows": (1, 1, 1, 0)}, "wait for a reset"),
        ({"nvmlDeviceGetRemappedRows": (1, 1, 0, 1)}, "cannot replace rows"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x40}, "held back: temperature"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x4}, None),  # a limit of power that somebody set
        ({"nvmlDeviceGetCurrPcieLinkWidth": 8, "nvmlDeviceGetMaxPcieLinkWidth": 16}, "PCIe links are narrower"),
    ],
)
def test_what_the_management_library_says_of_a_device_is_found(monkeypatch, answers, what) -> None:
    known = {"nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle"}
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(answers=known | answers))
    facts = healthy()
    facts[3]["device"]["health"] = devices_module.health("GPU-3")
    found = list(devices_module.health_findings(facts))
    assert [finding.where for finding in found] == ([] if what is None else ["rank 3 (n2)"])
    assert what is None or what in found[0].what
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(answers={"nvmlInit": None}))
    assert devices_module.health("GPU-3") is None, "another machine's device"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert devices_module.health("GPU-3") is None, "not installed"


def test_a_link_that_is_down_is_found_beside_devices_whose_links_are_up() -> None:
    facts = healthy()
    for fact in facts:
        fact["device"]["health"] = {
            "uncorrected": 0, "rows_pending": 0, "rows_failed": 0, "held_back": 0, "width": None, "most_width": None,
        }  # fmt: skip
        fact["device"]["health"]["links_up"] = 17 if fact["rank"] == 2 else 18
    (found,) = devices_module.health_findings(facts)
    assert found.where == "rank 2 (n2)" and "NVLinks are down: other devices have 18" in found.what


def test_a_device_that_computes_another_product_or_slower_is_found() -> None:
    rate, digest = devices_module.product(torch.device("cpu"), size=64)
    assert devices_module.product(torch.device("cpu"), size=64)[1] == digest and rate > 0
    assert list(devices_module.product_findings(healthy(), [(7e14, digest)] * 4)) == []
    wrong, slow = devices_module.product_findings(
        healthy(), [(7e14, digest), (7e14, "another"), (7e14, digest), (5e14, digest)]
    )
    assert wrong.where == "rank 1 (n1)" and "another product" in wrong.what
    assert slow.where == "rank 3 (n2): 500" and "700 TFLOP/s" in slow.what


def test_a_rank_that_does_not_come_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    monkeypatch.setattr(examine_module.runtime, "meeting_store", lambda name, timeout_s: server)
    monkeypatch.setattr(examine_module.runtime, "world_size", lambda: 4)
    facts = healthy()
    for rank in (1, 2):
        server.set(f"facts/{rank}", json.dumps(facts[rank]))
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"did not connect within 1 s: 3 \(on n2\)") as raised:
        meet(1.0).gather("facts", facts[0])
    assert exit_code(raised.value) == 1, "another start may succeed"
    assert time.monotonic() - began < patient(20)


@pytest.fixture(scope="module")
def hosts() -> Any:
    try:
        with Hosts(2) as made:
            yield made
    except Unavailable as reason:
        pytest.skip(str(reason))


def examine(hosts: Hosts, folder: Path, names: list[str], *options: str) -> tuple[Any, ...]:
    """Run the doctor on hosts; return the exit code of the first one, and what each printed."""
    command = ["env", "OMP_NUM_THREADS=1", *MESHPAR, "doctor", *options, "--node-rank"]
    started = [
        subprocess.Popen(
            hosts.command(name, [*command, str(n)]),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n, name in enumerate(names)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:  # where one hangs, none is left
            process.kill()
    return started[0].returncode, *outputs


def test_on_two_hosts_a_misplaced_mesh_is_flagged_at_full_speed(hosts: Hosts, tmp_path: Path) -> None:
    options = ["--mesh", "dp_replicate=2,dp_shard=2", "--nodes", "4", "--nproc", "1", "--head", "n1:29411"]
    code, *outputs = examine(hosts, tmp_path, IN_TURN, *options)
    assert code == 1, outputs
    assert "4 ranks on 2 hosts: ranks 0, 2 (n1), 1, 3 (n2)" in outputs[0]
    assert "axis dp_shard (size 2) should be inside a host and spans 2" in outputs[0]
    assert re.search(r"^dp_replicate=2 +one host$", outputs[0], re.MULTILINE)
    assert re.search(r"^dp_shard=2 +2 hosts$", outputs[0], re.MULTILINE)
    found = re.findall(r"^ *\d+\. (.*)", outputs[0], re.MULTILINE)
    assert len(found) == outputs[0].count("where:")
    assert len(found) == 1, "and nothing else is wrong"


RECIPE = """\
name: job
mesh: dp_shard=2
device: cpu
preflight: fail
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}
data: {source: stdlib, sequence_length: 32, micro_batch: 2}
training: {steps: 3}
"""


@pytest.mark.long
def test_a_measured_profile_is_one_that_the_forecast_takes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    done = subprocess.run(
        [*MESHPAR, "doctor", "--nproc", "2", "--profile", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = Hardware.load(path)
    assert measured.node == 2 and 1e9 < measured.peak["float32"] < 1e14 and 1e7 < measured.node_bandwidth < 1e12
    assert "the network was not measured" in measured.sources
    (tmp_path / "job.yaml").write_text(RECIPE)
    plan = [*MESHPAR, "plan", str(tmp_path / "job.yaml"), "--hardware", str(path)]
    done = subprocess.run(plan, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
