"""Which ranks live, what each is doing, and how a job ends when one fails, is lost, or is asked to stop."""

from parcompile.runtime.liveness.recording import doing, follow, set_stage

from .recording import records
from .reporting import report_errors, share_errors, share_errors_of
from .stopping import STOPPED_EXIT_CODE, Stopped, StopSignals, current, end_watch, has_failed, watch
