"""The call that starts a run from a Python program or a notebook: ``bamboo.train``."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from engine.api.run import WITHIN, Callback, RunChild, TrainingRun, print_program
from engine.core.errors import Problem, UserError
from engine.core.job.hugging_face import hugging_face_fields
from engine.core.job.job import FACTORY, Job

__all__ = ["TrainingRun", "dry_run", "resume", "train"]

_PLAIN = (str, int, float, bool, Mapping, type(None))


def train(
    model: object = None,
    data: object = None,
    *,
    job: Job | str | os.PathLike[str] | None = None,
    kills: Sequence[str] = (),
    twin: bool = True,
    resume: TrainingRun | str | os.PathLike[str] | None = None,
    other_bits: bool = False,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    tee: bool = False,
    grace: str = "120s",
    injectable: bool = True,
    in_process: bool = False,
    etcd: str = "",
    etcd_plain_http: bool = False,
    isa: str = "",
    trust_code: bool = False,
    hf: str | os.PathLike[str] = "",
    hf_random: bool = False,
    **values: object,
) -> TrainingRun:
    """Starts a run as `bamboo run` does, and returns its handle as soon as it has a folder.

    `model` and `data` are names (``mine:small``), or functions, classes, modules and sources of data that a worker can
    import by name. `job` is a job file, the ``run.json`` of a run, or a `Job`; `values` are fields of the job and
    override it. The `callbacks` (functions of a committed step, or loggers) are called in a thread of this process.
    `hf` is a model of transformers (ID or folder); `hf_random` draws its weights. `quiet` prints no progress. The other
    arguments are the options of `bamboo run`.

    Raises:
        UserError: with every problem of the job, or because no worker could import a part of it.
        BambooError: the run cannot start; its class tells why, as its exit code does.
    """
    _refuse_a_worker()
    flags = _flags(no_twin=not twin, other_bits=other_bits, tee=tee, in_process=in_process, trust_code=trust_code)
    texts = {"--grace": grace, "--etcd": etcd, "--isa": isa, "--injectable": "" if injectable else "no"}
    of_texts = [word for name, text in texts.items() if text for word in (name, text)]
    options = [*_file(job), *_kills(kills), *flags, *_flags(etcd_plain_http=etcd_plain_http), *of_texts]
    if resume is not None:
        options += ["--resume", str(resume.folder) if isinstance(resume, TrainingRun) else os.fspath(resume)]
    values, data = _with_hugging_face(os.fspath(hf), hf_random, model, data, values)
    keywords = _keywords(model, data, job, values, has_weights=resume is None)
    child = RunChild(options, keywords, _folders(keywords), quiet=quiet)
    try:
        return TrainingRun(child, child.folder(), callbacks)
    except BaseException:
        child.stop()
        raise


def resume(run: TrainingRun | str | os.PathLike[str] = "latest", **values: Any) -> TrainingRun:
    """Resumes a run from its newest checkpoint, as `train(resume=run)` does; `values` are arguments of `train`."""
    return train(resume=run, **values)


def dry_run(
    model: object = None,
    data: object = None,
    *,
    job: Job | str | os.PathLike[str] | None = None,
    kills: Sequence[str] = (),
    trust_code: bool = False,
    hf: str | os.PathLike[str] = "",
    hf_random: bool = False,
    **values: object,
) -> str:
    """Returns the program of a job as `bamboo run --dry-run` prints it; starts no worker. Raises as `train` does."""
    _refuse_a_worker()
    values, data = _with_hugging_face(os.fspath(hf), hf_random, model, data, values)
    keywords = _keywords(model, data, job, values, has_weights=False)
    options = [*_file(job), *_kills(kills), *(["--trust-code"] if trust_code else [])]
    return print_program(options, keywords, _folders(keywords))


def called_with(data: object, values: Mapping[str, object]) -> tuple[dict[str, Any], Iterable[str]]:
    """Returns the fields that a call beside `train` gives, and the folders where workers find what they name."""
    _refuse_a_worker()
    keywords = _keywords(None, data, None, values, has_weights=False)
    return keywords, _folders(keywords)


def _with_hugging_face(
    path: str, is_random: bool, model: object, data: object, values: Mapping[str, object]
) -> tuple[dict[str, object], object]:
    """Returns the fields given in a call with those of a model of transformers, and the data unless they have it."""
    parts = {"model": model, "data": os.fspath(data) if isinstance(data, os.PathLike) else data}
    of_model, args = hugging_face_fields(path, is_random, parts)
    merged: dict[str, object] = {**values, **of_model}
    for name, value in args.items():
        field, _, argument = name.partition(".")
        own = merged.get(field)
        merged[field] = {argument: value, **(own if isinstance(own, Mapping) else {})}
    return merged, data if "data" not in of_model else None


def _refuse_a_worker() -> None:
    """Raises UserError in a worker: importing the user's program there would start runs endlessly."""
    if os.environ.get(WITHIN):
        hint = 'put the call below: if __name__ == "__main__":'
        expected = "to be called by a program, not while a worker imports it"
        raise UserError([Problem("train()", expected, "", hint)])


def _file(job: Job | str | os.PathLike[str] | None) -> list[str]:
    return [] if job is None or isinstance(job, Job) else [os.fspath(job)]


def _flags(**switches: bool) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, is_given in switches.items() if is_given]


def _kills(kills: Sequence[str]) -> list[str]:
    return [word for kill in kills for word in ("--kill", kill)]


def _keywords(
    model: object,
    data: object,
    job: Job | str | os.PathLike[str] | None,
    values: Mapping[str, object],
    *,
    has_weights: bool,
) -> dict[str, Any]:
    """Returns the fields given in a call; a module starts with its current weights."""
    of_job = {field.name: getattr(job, field.name) for field in fields(Job)} if isinstance(job, Job) else {}
    parts = {name: part for name, part in (("model", model), ("data", data)) if part is not None}
    try:
        keywords = {**of_job, **{name: _plain(name, value) for name, value in {**values, **parts}.items()}}
    except UserError as error:
        raise error.with_traceback(None) from None  # the caller's line counts, not the path to the rule
    torch = sys.modules.get("torch")
    if has_weights and torch is not None and isinstance(model, torch.nn.Module) and not keywords.get("init"):
        from engine.api.weights import keep_weights

        results = Path(keywords.get("results") or os.environ.get("BAMBOO_RESULTS") or Job().results)
        keywords["init"] = str(keep_weights(model, results))
    return keywords


def _plain(name: str, value: object) -> Any:
    """Returns the JSON value of a field: a function becomes its name, a path a text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(name, part) for part in value]
        return parts if name in ("partition", "param_groups") else ",".join(map(str, parts))
    return value if isinstance(value, _PLAIN) else import_path(name, value)


def _folders(keywords: Mapping[str, Any]) -> Iterable[str]:
    return list(folders_of(text for value in keywords.values() if isinstance(value, str) for text in value.split(",")))


# Import paths of objects that a program passes as parts of a job: ``package.module:attribute``, for workers.
#
# Rules: nothing is pickled. A function, class or object is passed by the name under which a worker can import it. An
# object that no worker could import is refused, with the reason and a way out.

_WAY_OUT = "put it into a module, such as mine.py (in a notebook: %%writefile mine.py), and import it from there"


def import_path(field: str, thing: object) -> str:
    """Returns the name of a function, a class or an object, ``package.module:attribute``; a text stands for itself.

    Raises UserError if no worker could import it.
    """
    if isinstance(thing, str):
        return thing
    if isinstance(thing, ModuleType):
        _refuse(field, thing, f"it is a module; pass one of its functions, such as {thing.__name__}.make")
    name = getattr(thing, "__qualname__", None)
    module, attribute = _of_function(field, thing, name) if isinstance(name, str) else _of_object(field, thing)
    path = f"{_importable(field, thing, module)}:{attribute}"
    if not FACTORY.fullmatch(path):
        _refuse(field, thing, f"{path!r} is not a name that bamboo accepts")
    return path


def _of_function(field: str, thing: object, name: str) -> tuple[str, str]:
    module = str(getattr(thing, "__module__", ""))
    if "<lambda>" in name:
        _refuse(field, thing, f"a lambda has no name that a worker could import; write a function: {_WAY_OUT}")
    if "<locals>" in name:
        _refuse(field, thing, f"it was made inside of another function; {_WAY_OUT}")
    if "." in name:
        _refuse(field, thing, "it belongs to a class; write a function of a module that calls it")
    if getattr(sys.modules.get(module), name, None) is not thing:
        _refuse(field, thing, f"{module}.{name} is another object; pass that one, or give this one a name of its own")
    return module, name


def _of_object(field: str, thing: object) -> tuple[str, str]:
    own = [sys.modules[name] for name in (type(thing).__module__, "__main__") if name in sys.modules]
    for module in (*own, *list(sys.modules.values())):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is thing and name.isidentifier() and not name.startswith("_"):
                return module.__name__, name
    kind = type(thing).__name__
    way_out = "pass its class or a function that makes it, or assign it at the top of a module and import it from there"
    _refuse(field, thing, f"a worker imports it by name, and this {kind} has none: {way_out}")


def _importable(field: str, thing: object, module: str) -> str:
    """Returns the name under which a worker imports a module, which is not ``__main__`` for the program itself."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m package.module
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not str(file).endswith(".py"):
        _refuse(field, thing, f"it has no file that a worker could import; {_WAY_OUT}")
    if not Path(file).stem.isidentifier():
        _refuse(field, thing, f"{Path(file).name!r} is not a module name; {_WAY_OUT}")
    return Path(file).stem


def folders_of(paths: Iterable[str]) -> Iterator[str]:
    """Yields the folders in which this process, but not a new one, finds the modules of some names."""
    places = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path.cwd())}
    for path in paths:
        if not FACTORY.fullmatch(path):
            continue
        folder = _folder_of(path.partition(":")[0].partition(".")[0])
        if folder and folder not in places:
            places.add(folder)
            yield folder


def _folder_of(module: str) -> str:
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if module not in sys.modules and file is not None and Path(file).stem == module:
        return str(Path(file).resolve().parent)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    places = spec.submodule_search_locations if spec is not None else None
    if places:
        return str(Path(next(iter(places))).resolve().parent)
    return str(Path(spec.origin).resolve().parent) if spec is not None and spec.has_location and spec.origin else ""


def _refuse(field: str, thing: object, why: str) -> NoReturn:
    name = getattr(thing, "__qualname__", type(thing).__name__)
    raise UserError([Problem(field, "a part that workers can import", str(name), why, "train()")])
