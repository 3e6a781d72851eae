"""cofire: convolutional networks that compute only what an input needs.

The files, in the data's way; each imports only from files above it:

    errors.py            what a user can do wrong, one class each
    text.py              tables as text
    progress.py          how far long work has come
    shell.py             what all commands share: --json, errors, exit codes
    extras.py            packages that only some features need
    plugins.py           methods, criteria and backbones from outside
    files/
        lock.py          one process at a time in a folder
        atomic.py        files that are whole or not there
        tensors.py       tensor files and model folders
        strict.py        TOML and JSON tables <-> frozen dataclasses
        card.py          what a model expects, and what is known of it
    data/
        augmenting.py    what training does to pictures
        images.py        sets of images, and the batches they are fed in
        feeding.py       any loader -> checked batches
        decoding.py      encoded pictures -> pixels
        folders.py       folders of pictures: which files, which classes
        shards.py        encoded pictures in a few large files
        stored.py        images that are decoded batch by batch
        layouts.py       ImageNet as class folders or Parquet -> shards
        archives.py      the original archives of CIFAR -> files of pixels
        sources.py       digits, CIFAR, ImageNet, folders, synthetic images
    backbones/
        published.py     weights that others published: where to get them
        registry.py      create_backbone, list_backbones, load_weights
        vgg.py           VGG 11 to 19, CIFAR and ImageNet
        resnet.py        ResNet 20 to 110 (CIFAR), 18 to 50 (ImageNet)
        mobilenet.py     MobileNet V1 and V2
        packages.py      networks of timm and torchvision
    graph/
        units.py         what can be switched off, and where gates may sit
        following.py     torch.fx as far as it goes; the rest as it is
        tracing.py       nn.Module -> flat list of calls
        ops.py           what one call is
        walk.py          calls -> ops, by running them once
        graph.py         calls and ops -> Graph
        live.py          which channels can be non-zero at each op
        masks.py         what a mask switches off: filters, pixels, blocks
        branches.py      residual branches, from fork to addition
        open_units.py    a conv's unit as long as nothing gates it
        placement.py     Graph -> its units and sites, by the rules
        cost.py          Graph + masks -> MACs, in three columns
    gates/
        pooling.py       each channel's highest response
        targets.py       activations -> which filters should fire
        losses.py        logits + what they should be -> loss
        heads.py         a unit's input -> logits
        base.py          what a method is; the registry of methods
        per_group.py     a method as one gate per group
        switchboard.py   what a gated forward calls at each site
        forward.py       calls and sites -> the gated forward
        gating.py        gate(model, config) -> GatedModel
        fixed.py         the same filters for every image
        ftwt.py          Fire Together Wire Together
        lockstep.py      call by call on all images: norms fitted under masks
        ftwt_offline.py  fit_heads: FTWT without training the network; static_twin
        fbs.py           Feature Boosting and Suppression: the strongest filters, rescaled
        lccl.py          a cheap conv says which positions are not computed
        blockdrop.py     a policy on the image says which residual branches run
        lcs.py           one of a few masks per group, chosen with Gumbel noise
        cgnet.py         partial sums say at which positions the rest is added
        rnp.py           an agent that walks through the layers says how wide each is
        persistence.py   save, load
    export.py            model -> ONNX
    importing/
        spelled.py       functions that graphs spell out -> one call
        calls.py         calls of torch under construction
        onnx_file.py     an ONNX file as plain data, within limits
        onnx_table.py    which kinds of ONNX nodes there are
        onnx_layers.py   nodes with windows or weights as layers
        onnx_resize.py   resizing of maps, found by trying
        onnx_ops.py      nodes on elements, shapes and channels
        onnx_graph.py    all nodes of a file -> a module
        exported.py      a program of torch.export -> a module
        models.py        imported(graph) -> a module
    runtime/
        _native.pyi      what the compiled module offers
        outline.py       what a program file says of itself, read without PyTorch
        program.py       ops on numbered buffers
        program_file.py  their file, written whole and read strictly
        folding.py       a program -> the same function in fewer ops
        building.py      ops under construction
        elementwise.py   a function of one element -> scale and shift, or an activation
        maps.py          resampling, reductions, softmax, norms and standardised weights -> attrs, by trying
        windows.py       arguments of convs and poolings -> kernel, stride, padding
        gates.py         units and gates -> which calls carry which gate
        lowered_ids.py   ids of elements and the buffers that hold them; ops on one or two operands
        lowered_calls.py  convs, norms, activations, maps and ops over channels as ops
        lowering.py      model -> program
        integers.py      what int8 does to numbers, in plain torch
        meanings.py      what each op computes, in plain torch
        interpreter.py   what a program means, in plain torch
        ranges.py        what buffers hold for a few images -> scales of 8 bits
        quantizing.py    program -> the same in int8
        quantized.py     quantize(model, images) -> Quantized
        floors.py        what an op would take at the CPU's best
        profile.py       where the time of a call goes, op by op
        forced.py        masks that the caller gives
        limits.py        what a program may cost
        engine.py        compile(model) -> Engine
        observed.py      what a program did on known images, beside its file
        latency.py       milliseconds at any keep rate
        classify.py      a picture through an engine
        of_pixels.py     model and card -> the engine that takes pixels
    serving/
        protocol.py      the Open Inference Protocol: bytes <-> images and answers
        metrics.py       what a server counts, for Prometheus
        models.py        the programs a server has
        app.py           routes, limits, back-pressure
        command.py       its command line
    doctor.py            what is installed, and what the engine gets
    estimate.py          cost of a config before training; ratio for a budget
    evaluation.py        evaluate() -> Report
    calibrate.py         the threshold for a budget of MACs
    training/
        log.py           the log of a run, one JSON object per line
        tracking.py      the log in TensorBoard, trackio or wandb too
        checkpoints.py   a run's state on disk
        recipe.py        Recipe: how to train
        processes.py     the processes of a run
        averaging.py     a moving average of weights
        callbacks.py     what may be done to a run from outside
        memory_format.py  weights laid out for fast steps
        freed_memory.py  what one step frees is kept for the next
        setup.py         what learns, and its seeds
        task.py          output and target -> loss
        loop.py          fit()
    pruning/
        channels.py      channels that leave together, and the MACs that remain
        flow.py          which channels arrive where, once some have left
        removal.py       which channels can leave for good
        probe.py         the whole model with factors on its channels
        surgery.py       model and masks -> the smaller module
        base.py          what a static method is; the registries of its parts
        allocation.py    scores and a budget -> which channels stay
        recovery.py      what the smaller module gets back before training
        l1.py            small weights leave
        random.py        any leave, the same share everywhere
        taylor.py        what the loss feels least leaves
        fpgm.py          what other filters can stand in for leaves
        sampling.py      what layers read at random places
        thinet.py        what the next layer's sums miss least leaves
        cp.py            what LASSO does not need leaves
        pfp.py           what has no large share in any sum leaves
        eagleeye.py      how much each group keeps is searched
        scop.py          what a knock-off serves as well leaves
        dcp.py           what tells classes apart stays
        apply.py         prune(model, config)
        sfp.py           small weights are zeroed while the model learns
    trim.py              what never runs leaves for good, what always runs alike loses its head
    second_look.py       a pruned copy looks first, the network where that is in doubt
    signatures.py        filters per group: uniform, Taylor, from a file
    zoo/                 trained models that ship with cofire
    experiments/
        provenance.py    machine, versions, commit of a number
        paper.py         the paper's numbers
        recipes.py       a recipe file -> Experiment
        budgets.py       a trained model brought to its budget
        runs.py          the verbs that carry one out, and their folders
        twin.py          the static twin of a run, trained the same way
        reproduce.py     the paper's tables with ours beside them
    exporting.py         its command line
    analysis/
        decisions.py     what every gate decided for a whole set, as bits
        routes.py        clusters, core and silent filters, agreement, redundancy
        spending.py      where the MACs go: images, classes, extremes
        responses.py     maximum responses and heatmaps of any unit
        tradeoff.py      many runs: accuracy against MACs, foretold against reached
        compressibility.py  each group pruned alone: does its core share foretell it?
        drawing.py       how figures look and are written
        figures.py       one function per figure
        panels.py        a figure, how to read it, its values
        study.py         every analysis of one run
        page.py          studies -> one HTML page
        command.py       the command line of the analyses
    shift/
        corruptions.py   pictures -> worse pictures
        loading.py       the batches of a set under a corruption
        calibration.py   Brier score and expected calibration error
        drift.py         how far masks moved
        paper.py         the paper's shift tables
        results.py       what models did under shift, as JSON and tables
        plot.py          the same as a figure
        measure.py       shift(models, images) -> Shift
        runs.py          finished runs -> models and their images
        command.py       its command line
    bench/
        rounds.py        interleaved timings
        masks.py         random masks of a wanted cost
        ours.py          our engine as the bench sees it
        portable.py      one ONNX form for all peers
        peers.py         the other engines
        sliced.py        the paper's way: weights sliced per call
        results.py       what a bench found
        plan.py          what a bench runs on: model, images, masks
        run.py           bench(plan) -> Result
        program.py       a program alone
        report.py        tables and plots
        paper.py         the paper's latency table
        command.py       the bench's command line
    comparison/
        contenders.py    every registered method, and its experiment at a budget
        jobs.py          one method, one seed, one folder
        cluster.py       the same on Ray
        timing.py        milliseconds of all in the engine
        table.py         what was found, as a table and as JSON
        known.py         that file read back, also for jobs whose folders are gone
        plot.py          accuracy against MACs and milliseconds
        compare.py       compare(recipes, methods, macs) -> Comparison
        command.py       its command line
    speedup/
        models.py        a name on the command line -> a dense model and its card
        pictures.py      a folder or a NumPy file -> pictures as a model expects them
        measure.py       agreement, MACs, milliseconds beside the dense network
        distilling.py    what follows the dense network: gates, a first look, a twin
        whole.py         speedup(model, images, budget) -> Speedup
        command.py       its command line
    compiling.py         the command line of compile
    demo.py              the whole method on digits
    measured.py          the paper's latency and shift tables, made again
    results.py           result files of runs, and the tables in documents
    explore/
        knob.py          what the slider moves: the threshold, or k
        subject.py       what is looked at: an engine, pictures, the model
        look.py          one picture through it, all filters and gated
        drawing.py       that as HTML: cards, a wall of lights, heatmaps
        page.py          the page
        command.py       its command line
    completion.py        scripts for shells, made of the command line
    public.py            every name of `cofire`
    cli.py               the command line
    start.py             where it starts, with PyTorch or without
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cofire.errors import (
    BusyError,
    CofireError,
    CompileError,
    ConfigError,
    DataError,
    FileError,
    NoUnitError,
    TraceError,
    TrainingError,
)
from cofire.runtime.engine import Engine, compile, load_program
from cofire.runtime.limits import Limits

if TYPE_CHECKING:
    from cofire.public import *  # noqa: F403

__all__ = [
    "FBS",
    "FTWT",
    "L1",
    "LCCL",
    "LCS",
    "RNP",
    "AbstractCallback",
    "AbstractGate",
    "AbstractMask",
    "AbstractMethod",
    "Backbone",
    "BlockDrop",
    "BlockMask",
    "BusyError",
    "CGNet",
    "Card",
    "CofireError",
    "Comparison",
    "CompileError",
    "ConfigError",
    "Cost",
    "DataError",
    "Decision",
    "Engine",
    "Estimate",
    "FileError",
    "FilterMask",
    "FitResult",
    "Fixed",
    "GateConfig",
    "GatedModel",
    "Graph",
    "Limits",
    "NoUnitError",
    "PixelMask",
    "Placement",
    "PruneConfig",
    "Quantized",
    "Random",
    "Recipe",
    "Report",
    "SecondLook",
    "Shift",
    "Site",
    "Solution",
    "Speedup",
    "Step",
    "Taylor",
    "TraceError",
    "TrainingError",
    "Uniform",
    "Unit",
    "Units",
    "analysis",
    "calibrate",
    "compare",
    "compile",
    "cost",
    "create_backbone",
    "data",
    "estimate",
    "evaluate",
    "expected_macs",
    "fit",
    "fit_heads",
    "gate",
    "list_backbones",
    "load",
    "load_program",
    "load_weights",
    "mask_loss",
    "prune",
    "quantize",
    "register_backbone",
    "register_criterion",
    "register_gate",
    "register_method",
    "save",
    "shift",
    "signatures",
    "solve_ratio",
    "speedup",
    "static_twin",
    "trace",
    "trim",
    "zoo",
]


class _Package(ModuleType):
    """`import cofire` needs numpy alone, so that a program runs where PyTorch is not.

    The names that need PyTorch are there once the first of them is asked for, and so are the files.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("cofire")  # too slow for `import cofire`
        if name not in _FUNCTIONS:
            return self._file(name)
        try:
            found = getattr(importlib.import_module("cofire.public"), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"cofire.{name} needs {error.name}, which is not installed: pip install cofire"
            ) from error
        vars(self)[name] = found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, as any module: what is sent to another process may speak of cofire."""
        return importlib.import_module, (self.__name__,)

    def _file(self, name: str) -> ModuleType:
        if not name.startswith("_") and importlib.util.find_spec(f"cofire.{name}") is not None:
            return importlib.import_module(f"cofire.{name}")
        raise AttributeError(f"module 'cofire' has no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        """The import system puts each imported file here; one named like a public function must not hide it."""
        if not (isinstance(value, ModuleType) and name in _FUNCTIONS):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *__all__, "__version__"})


_FUNCTIONS = set(__all__) - {"analysis", "data", "signatures", "zoo"}  # and classes; these four are files
sys.modules[__name__].__class__ = _Package
