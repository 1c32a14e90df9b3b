"""`show_config` and `doctor`: what they say about this machine and about made-up ones."""

import json
import os
import subprocess
import sys

import pytest

import ktcy
from ktcy import cli, doctor, experts, kernels
from ktcy.kernels import VARIANTS

REAL = [v.name for v in VARIANTS.values() if not v.emulates]


def files(root, tree):
    for path, text in tree.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MACHINE = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Xeon of Tomorrow @ 9 GHz\nmodel\t\t: 1\n",
    "proc/meminfo": "MemTotal:       4194304 kB\nMemFree:        1048576 kB\nMemAvailable:   2097152 kB\n",
    "proc/self/cgroup": "0::/box/inner\n",
    "sys/fs/cgroup/box/memory.max": "1073741824\n",
    "sys/fs/cgroup/box/inner/memory.max": "max\n",
    "sys/fs/cgroup/box/inner/cpu.max": "150000 100000\n",
    "sys/devices/system/node/node0/cpulist": "0-4095\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       3145728 kB\n",
    "sys/devices/system/node/node2/cpulist": "\n",
    "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal:       1048576 kB\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "12\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "3\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/box\n1:name=systemd:/\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "536870912\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


def test_show_config_tells_every_variant():
    """C08: what is in use, what else can run, and what the others lack."""
    config = ktcy.show_config()
    assert config["ktcy"] == ktcy.__version__ and config["variant"] == ktcy.__cpu_variant__
    assert list(config["variants"]) == REAL[::-1]
    for name, entry in config["variants"].items():
        assert entry == {"available": not kernels.missing(name), "missing": kernels.missing(name)}


def test_show_config_tells_what_each_format_uses():
    """C08: layout, variant, and from how many rows on the tile path is taken."""
    chosen = kernels.default()
    formats = ktcy.show_config()["formats"]
    assert list(formats) == list(chosen.formats)
    for name, entry in formats.items():
        fmt = chosen.format(name)
        assert entry == {"layout": fmt.layout, "variant": chosen.name, "tiles_above_rows": fmt.few_rows}


def test_show_config_returns_and_prints_nothing(capfd):
    config = ktcy.show_config()
    assert capfd.readouterr() == ("", "")
    assert json.loads(json.dumps(config)) == config


def test_repr_is_a_table_for_people():
    config = ktcy.show_config()
    lines = repr(config).splitlines()
    assert lines[0].split() == ["ktcy", ktcy.__version__]
    assert any(line.startswith("numa_placement  ") for line in lines)
    assert any(line.split() == [ktcy.__cpu_variant__, "available"] for line in lines)
    for entry in config["variants"].values():
        assert all(any(reason in line for line in lines) for reason in entry["missing"])
    assert not any(bracket in repr(config) for bracket in "{}[]'")


def test_forced_variant_is_said():
    code = "import ktcy; print(ktcy.show_config()['reason'])"
    for variant, reason in (("avx2", "KTCY_VARIANT names it"), ("", "the best that can run here")):
        env = {**os.environ, "KTCY_VARIANT": variant}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stdout.strip() == reason, done.stderr


def test_a_build_without_the_best_variant_is_said(monkeypatch):
    lacking = {v: ["it was not built; KTCY_VARIANTS chooses"] for v in ("avx512", "avx512_vnni")}
    monkeypatch.setattr(doctor.kernels, "missing", lambda name: lacking.get(name, ["the CPU lacks it"]))
    assert doctor._reason("avx2") == "the best of those built; this machine can run avx512_vnni"
    assert doctor._reason("avx512_vnni") == "the best that can run here"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "same_bits", lambda: {"variants": [], "threads": [], "differ": []})


def test_doctor_on_a_made_up_machine(tmp_path, quick):
    """C42: limits of parent cgroups count; a node of memory only is listed; absent files are left out."""
    report = doctor.doctor(files(tmp_path, MACHINE))
    assert report["cpu"] == "Xeon of Tomorrow @ 9 GHz"
    assert report["memory"] == {"total": 4 << 30, "available": 2 << 30, "cgroup_limit": 1 << 30}
    assert report["huge_pages"] == {"transparent": "never", "2048kB": {"reserved": 12, "free": 3}}
    assert report["numa_memory"] == {"0": 3 << 30, "2": 1 << 30}
    assert report["topology"]["cpu_quota"] == 1.5 and report["topology"]["default_threads"] == 1
    assert report["topology"]["nodes"]["2"] == ""
    text = repr(report)
    assert "cgroup_limit  1.0 GiB" in text and "2048kB       reserved 12, free 3" in text and "0  3.0 GiB" in text


def test_doctor_reads_cgroup_v1(tmp_path, quick):
    assert doctor.doctor(files(tmp_path, {**MACHINE, **V1}))["memory"]["cgroup_limit"] == 512 << 20


def test_doctor_without_proc_and_sys(tmp_path, quick):
    """A sandbox that hides everything still gets a report."""
    report = doctor.doctor(tmp_path)
    assert report["cpu"] == "unknown"
    assert report["memory"] == {"total": None, "available": None, "cgroup_limit": None}
    assert report["huge_pages"] == {"transparent": None} and report["numa_memory"] == {}
    assert "available     none" in repr(report)


@pytest.mark.parametrize(
    "cpus, text", [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((8, 0, 2, 1), "0-2,8"), ((6, 7, 10, 11), "6-7,10-11")]
)
def test_ranges(cpus, text):
    assert doctor._ranges(cpus) == text


def test_doctor_command():
    """C29: the check that users can run passes here, on every variant that this machine has."""
    done = subprocess.run([sys.executable, "-m", "ktcy", "doctor", "--json"], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert report["same_bits"]["variants"] == kernels.available() and report["same_bits"]["differ"] == []
    assert report["same_bits"]["threads"][0] == 1
    assert {"variants", "formats", "topology", "memory", "huge_pages", "numa_memory"} <= set(report)


def test_doctor_prints_the_table(capsys, quick):
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["ktcy", ktcy.__version__]


@pytest.mark.parametrize("rows", ["all tokens at once", "one by one"])
def test_doctor_finds_other_bits(monkeypatch, capsys, rows):
    """C29: one bit in one path of one run is found, named, and the exit code says so."""
    forward = experts.KTMoEWrapper.forward

    def wrong(layer, x, ids, weights):
        y = forward(layer, x, ids, weights)
        if layer.threads == max(counts) and (len(x) > 1) == (rows == "all tokens at once"):
            y.view("uint32")[-1, -1] ^= 1
        return y

    counts = doctor.same_bits()["threads"]
    monkeypatch.setattr(experts.KTMoEWrapper, "forward", wrong)
    assert cli.main(["doctor"]) == 1
    assert f"{kernels.available()[0]} with {max(counts)} threads" in capsys.readouterr().out


def test_version_and_unknown_commands(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"ktcy {ktcy.__version__}\n"
    for arguments in ([], ["docter"], ["doctor", "--yaml"]):
        with pytest.raises(SystemExit) as done:
            cli.main(arguments)
        assert done.value.code == 2


def test_threads_compared_are_those_that_run(monkeypatch):
    usable = len(os.sched_getaffinity(0))
    monkeypatch.setenv("KTCY_THREADS", str(usable + 62))
    assert max(doctor.same_bits()["threads"]) <= usable


def test_without_a_stdout(monkeypatch, quick):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["doctor"]) == 0


def test_a_reader_that_left():
    command = [sys.executable, "-m", "ktcy", "doctor", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()
        assert run.stderr.read() == "" and run.wait() == 1


def test_errors_are_one_line(monkeypatch, capsys):
    def refuse():
        raise OSError(28, "No space left on device", "layer-3.safetensors")

    monkeypatch.setattr(doctor, "doctor", refuse)
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "ktcy: [Errno 28] No space left on device: 'layer-3.safetensors'\n"
