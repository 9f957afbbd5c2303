"""Relax passes, one a file; ``pipeline.py`` is the table of contents."""

import tvm_ffi

from kvq.errors import KvqError

# A pass runs behind TVM's foreign function interface, which keeps the class of registered errors alone.
for _error in KvqError.__subclasses__():
    tvm_ffi.register_error(_error.__name__, _error)
