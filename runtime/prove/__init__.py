"""Does an engine train what one process would? Small drawn runs of any engine, compared with plain torch.

`ranks/` runs in the engine's interpreter; what is here draws, shrinks and reports, and imports no engine.
"""

from .certificate import Certificate, Proved
from .engine import Engine, EngineError
from .given import Given, GivenError, given, of_plan
from .proving import prove, shrink, verify

__all__ = [
    "Certificate",
    "Engine",
    "EngineError",
    "Given",
    "GivenError",
    "Proved",
    "given",
    "of_plan",
    "prove",
    "shrink",
    "verify",
]
