"""OpenAI Batch files: requests read from a stream, results appended to a file. No sockets.

`reader` turns lines into requests or bad lines, `chains` measures them, `discovery` finds their
shapes; `job` names a run and remembers which input its output belongs to, `writer` appends results
so that a crash at any byte can be resumed.
"""

from zfabric.batchfile.chains import estimate_tokens
from zfabric.batchfile.digests import DigestSet
from zfabric.batchfile.discovery import Discovery
from zfabric.batchfile.job import InputIdentity, Job, check_paths, errors_path_for, job_name
from zfabric.batchfile.lines import LINE_BYTES_MAX, bounded_lines, count_lines
from zfabric.batchfile.reader import BadLine, Request, read_requests
from zfabric.batchfile.writer import BatchOutput

__all__ = [
    "LINE_BYTES_MAX",
    "BadLine",
    "BatchOutput",
    "DigestSet",
    "Discovery",
    "InputIdentity",
    "Job",
    "Request",
    "bounded_lines",
    "check_paths",
    "count_lines",
    "errors_path_for",
    "estimate_tokens",
    "job_name",
    "read_requests",
]
