"""The version of the package, the compiler and the runtime: they are released together; and how it was installed."""

__version__ = "0.1.0"


def how_to_install(extras: str) -> str:
    """The command that adds `extras`, as "runtime,hf", to the package from where it came: index, folder or file."""
    # Only here: nothing else of these is needed to start.
    import importlib.metadata
    import json
    import shlex
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    try:
        told = importlib.metadata.distribution("parcompile").read_text("direct_url.json")
        url = str(json.loads(told)["url"]) if told else ""
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError, KeyError, TypeError):
        return f"install the extra {extras} of parcompile"
    if not url:
        return f"pip install 'parcompile[{extras}]'"
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if path is None:
        return f"pip install 'parcompile[{extras}] @ {url}'"
    if not path.exists():
        return f"install the extra {extras} of parcompile, from where it was installed ({path} is gone)"
    return f"pip install {shlex.quote(f'{path}[{extras}]')}"
