"""The page: pictures to pick, a place to drop one, a slider, and what the model makes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cofire.errors import DataError
from cofire.explore.drawing import CSS, as_picture, drawn
from cofire.explore.look import heat, look
from cofire.explore.subject import Pixels, Subject, read_picture
from cofire.extras import require

MAX_FILE = "10mb"


def gradio() -> Any:
    """The package, told to report to nobody."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    return require("gradio", package="gradio", extra="explore")


def build(subject: Subject) -> Any:
    """The page of a subject, as Gradio's Blocks."""
    gr = gradio()
    units = [unit.name for unit in subject.gated.units if unit.gated] if subject.gated else []
    knob = subject.knob

    def show(pixels_CHW: Pixels, place: float, unit: str | None) -> str:
        seen = look(subject, pixels_CHW, place)
        return drawn(seen, heat(subject, seen, unit) if unit else None)

    def pick(place: float, unit: str | None, event: Any) -> tuple[Pixels, str]:
        picked: Pixels = subject.pixels_NCHW[event.index]
        return picked, show(picked, place, unit)

    pick.__annotations__["event"] = gr.SelectData  # Gradio looks for it

    def drop(path: str | None, before: Pixels, place: float, unit: str | None) -> tuple[Pixels, str, str]:
        picture, problem = before, ""
        try:
            picture = before if path is None else read_picture(Path(path), subject.engine.input_shape)
        except DataError as error:
            problem = f"**Not shown:** {error}"
        return picture, problem, show(picture, place, unit)

    with gr.Blocks(title=f"cofire explore {subject.name}", analytics_enabled=False) as page:
        gr.Markdown(f"# {subject.name}\nPictures: {subject.images}, from the cheapest to the dearest.")
        pixels = gr.State(subject.pixels_NCHW[0])
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                captions = [f"{macs / 1e6:.2f} M" for macs in subject.macs_N]
                pictures = [as_picture(each) for each in subject.pixels_NCHW]
                gr.Markdown("Cheapest to dearest, in MACs")  # not a label, which would lie on the first pictures
                gallery = gr.Gallery(
                    list(zip(pictures, captions, strict=True)),
                    show_label=False,
                    object_fit="contain",
                    elem_id="pictures",
                    height=320,
                    allow_preview=False,
                    interactive=False,
                    format="png",
                )
                dropped = gr.File(label=f"Or drop a picture, up to {MAX_FILE[:-2]} MB", type="filepath", height=120)
                told = gr.Markdown("", elem_id="told")
                slider = gr.Slider(
                    knob.low,
                    knob.high,
                    step=knob.step,
                    value=knob.value,
                    label=knob.label,
                    interactive=knob.name != "none",
                    elem_id=knob.name,
                )
                unit = gr.Dropdown(units, value=units[-1] if units else None, label="Heatmap of", visible=bool(units))
            with gr.Column(scale=2, min_width=280):
                seen = gr.HTML(elem_id="seen")
        inputs = [pixels, slider, unit]
        # No bar, for the answer is there sooner; and of several wishes the last one counts.
        calm = {"show_progress": "hidden", "trigger_mode": "always_last"}
        gallery.select(pick, [slider, unit], [pixels, seen], **calm)
        dropped.change(drop, [dropped, *inputs], [pixels, told, seen], **calm)
        for control in (slider, unit):
            control.change(show, inputs, seen, **calm)
        page.load(show, inputs, seen, **calm)
    return page


def launch(page: Any, host: str, port: int) -> str:
    """Start it in the background; its address."""
    gr = gradio()
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # none from elsewhere
    _, address, _ = page.launch(
        server_name=host,
        server_port=port or None,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size=MAX_FILE,
        theme=gr.themes.Base(primary_hue="amber", **fonts),
        css=CSS,
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
    )
    return str(address).rstrip("/")
