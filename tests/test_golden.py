"""Twenty steps of each network and mode give the losses of cofire 0.1, bit for bit on the same kind of CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cofire import FTWT, Recipe, create_backbone, data, fit, gate

GOLDEN = Path(__file__).parent / "golden" / "ftwt_20_steps.json"
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet8_digits": {},
    "vgg11_bn": {},
    "mobilenet_v1": {"width": 0.5},
}
MODES = ("decoupled", "joint")


def losses(network: str, mode: Any, out: Path) -> list[float]:
    """Loss of each of 20 steps, on synthetic images or digits; one thread."""
    torch.manual_seed(0)
    model = create_backbone(network, **NETWORKS[network])
    images = data.digits()[0] if network.endswith("digits") else data.synthetic(160, seed=0)
    loader = images.take(slice(0, 160)).loader(8, train=True, augment="crop", pad=1)
    gated = gate(model, FTWT(ratio=0.8, mode=mode))
    fit(gated, loader, Recipe(epochs=1, lr=0.02, schedule="cosine"), out=out)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def this_cpu() -> dict[str, str]:
    """What bit-equal sums depend on, beside the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": model, "vectors": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("network", NETWORKS)
def test_twenty_steps_give_the_losses_of_0_1(network: str, mode: str, tmp_path: Path) -> None:
    """After an intended change ``.venv/bin/python tests/test_golden.py`` writes the file; the commit says why."""
    stored = json.loads(GOLDEN.read_text())
    wanted = stored["losses"][f"{network}, {mode}"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = losses(network, mode, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 20
    same = stored["made on"] == this_cpu()
    assert found == (wanted if same else pytest.approx(wanted, rel=1e-3))


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    found = {}
    for network in NETWORKS:
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                found[f"{network}, {mode}"] = losses(network, mode, Path(folder))
    GOLDEN.write_text(json.dumps({"made on": this_cpu(), "losses": found}, indent=1) + "\n")
    print(f"wrote {GOLDEN.name}")
