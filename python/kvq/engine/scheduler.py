"""Who runs in the next step: continuous batching over the pages of one cache. Numbers only, no tensors.

A request is a :class:`Job`: tokens that are to stand in the cache. What stands there already is the
length of its sequence; the difference is pending. A job with one pending token decodes, one with more
prefills (its prompt, or after a preemption everything), and a step mixes both.

- **Order.** Requests are served in the order of arrival. Every running job came before every waiting one.
- **Rows.** Each decoding job has a row in every step. What is left of the step's rows goes to prefills,
  the oldest first, in chunks of any size.
- **Pages.** The head of the queue is admitted when an open page is free and the pool, idle pages of the
  prefix cache included, has room for its tokens, what the running jobs still prefill, and a page for
  each of these to grow. A running job that finds no page takes those of the latest job, which goes back
  to the head of the queue and is computed again later; the latest job itself waits a step. Where all
  layers slide, a job has only the pages that its next rows see: the others are released after each step,
  when the prefix cache has seen them.

So the oldest job always runs, and alone it fits (``EngineCore.check`` sees to that): it ends after as many
steps as it has tokens at most, then the next one is the oldest. Nobody waits for ever.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from kvq.runtime.kv_cache import PagedKVCache
from kvq.runtime.prefix_cache import PrefixCache


@dataclass(eq=False)
class Job:
    """A request as the scheduler sees it.

    Attributes
    ----------
    id : int
        Also that of its sequence.
    tokens : array of int
        What is to stand in the cache: the prompt, and tokens as they are drawn.
    hit_tokens : int
        Tokens found in the prefix cache when it first ran; -1 until then.
    preemptions : int
        How often it went back to the queue.
    """

    id: int
    tokens: array[int]
    hit_tokens: int = -1
    preemptions: int = 0


class Scheduler:
    """Chooses the rows of each step.

    Parameters
    ----------
    cache : PagedKVCache
        Whose sequences it alone adds and removes.
    max_rows : int
        Most rows of a step, at least the cache's open pages.
    prefix : PrefixCache, optional
        Of the same pool; None to compute every prompt anew.

    Attributes
    ----------
    running, waiting
        Jobs in the order of arrival.
    preemptions : int
        Jobs sent back so far.
    """

    def __init__(self, cache: PagedKVCache, max_rows: int, prefix: PrefixCache | None) -> None:
        assert max_rows >= cache.open_pages.num_open, "every running sequence needs a row"
        self.cache, self.max_rows, self.prefix = cache, max_rows, prefix
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.preemptions = 0

    def add(self, job: Job) -> None:
        """Queue a job. Alone it must fit the pool."""
        self.waiting.append(job)

    def remove(self, job: Job, keep: bool = True) -> None:
        """Take a job out, wherever it is; its pages are free, or idle in the prefix cache, at once.

        Parameters
        ----------
        keep : bool
            Whether its sealed pages may serve others; not after a step that broke.
        """
        if job in self.running:
            self.running.remove(job)
            self._drop_sequence(job, keep)
        else:
            self.waiting.remove(job)

    def pending(self, job: Job) -> int:
        """Tokens of a running job that are not in the cache yet."""
        return len(job.tokens) - self.cache.length(job.id)

    def schedule(self) -> list[tuple[Job, int]]:
        """Choose the next step: jobs and their numbers of rows; empty only if there are no jobs.

        Jobs are admitted and preempted, and idle pages evicted, so that the step finds its pages.
        """
        step = _Step(self)
        index, preempted = 0, False
        while index < len(self.running):
            job = self.running[index]
            if step.take_row(job):
                index += 1
                continue
            wanted = step.rows_for(job)
            while wanted and step.pages_for(job, wanted) > step.pages and job is not self.running[-1]:
                self._preempt()
                preempted = True
            step.take(job, wanted)
            index += 1
        while self.waiting and not preempted and step.prefill_rows and self._admit(step.promised()):
            job = self.running[-1]
            step.take(job, step.rows_for(job))
        shortage = step.taken_pages - self.cache.num_free_pages
        if shortage > 0 and self.prefix is not None:
            self.prefix.evict(shortage)
        return step.shares

    def ran(self, shares: list[tuple[Job, int]]) -> None:
        """A step has run: pages that its prefills sealed can serve others, and those left behind are free."""
        for job, count in shares:
            unseen = self.cache.unseen_pages(job.id)
            if count > 1 or unseen or self.pending(job):
                self._publish(job)
            if unseen:
                self.cache.release_unseen(job.id)

    def clear(self) -> None:
        """Drop all jobs and everything in the prefix cache."""
        for job in [*self.running, *self.waiting]:
            self.remove(job, keep=False)
        if self.prefix is not None:
            self.prefix.clear()

    def check_integrity(self) -> None:
        """Compare jobs, sequences and pages; raises CacheError. Does not modify anything."""
        self.cache.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()
        assert [job.id for job in self.running] == self.cache.sequence_ids, "running jobs have sequences"
        assert all(self.pending(job) > 0 for job in self.running), "a running job has something to run"

    # ---- admission and preemption --------------------------------------------------------------
    def _admit(self, promised: int) -> bool:
        """Start the head of the queue if there is room beside the ``promised`` pages of running jobs."""
        cache, job = self.cache, self.waiting[0]
        if not cache.open_pages.num_free:
            return False
        found = self.prefix.match(job.tokens) if self.prefix is not None else []
        if self._is_being_computed(job, len(found)):
            return False
        taken = found[cache.first_page_seen(len(found) * cache.page_size) :]
        woken = sum(cache.pool.references(page) == 1 for page in taken)
        missing = max(0, cache.most_pages(len(job.tokens), self.max_rows) - len(taken))
        left = cache.pool.num_available - promised - woken - missing
        if self.running and left <= len(self.running):
            return False
        self.waiting.popleft()
        cache.add_sequence(job.id, found)
        if self.prefix is not None:
            self.prefix.insert(job.tokens, found)
        if job.hit_tokens < 0:
            job.hit_tokens = len(found) * cache.page_size
        self.running.append(job)
        return True

    def _is_being_computed(self, job: Job, found: int) -> bool:
        """Whether a running job is about to seal the page after the first ``found``, which this one needs."""
        end = (found + 1) * self.cache.page_size
        if self.prefix is None or end >= len(job.tokens):
            return False
        wanted = job.tokens[:end]
        return any(self.pending(other) > 1 and other.tokens[:end] == wanted for other in self.running)

    def _preempt(self) -> None:
        job = self.running.pop()
        self._drop_sequence(job, keep=True)
        self.waiting.appendleft(job)
        job.preemptions += 1
        self.preemptions += 1

    def _drop_sequence(self, job: Job, keep: bool) -> None:
        if keep:
            self._publish(job)
        self.cache.remove_sequence(job.id)

    def _publish(self, job: Job) -> None:
        """Give the prefix cache a job's sealed pages; the job lists the tree's where it has them already."""
        if self.prefix is not None:
            sequence = self.cache.sequence(job.id)
            pages = self.prefix.insert(job.tokens, sequence.pages, sequence.first_page)
            self.cache.replace_pages(job.id, pages)


class _Step:
    """Rows, workspace and pool pages of a step while they are given away."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._cache = scheduler, scheduler.cache
        length = self._cache.length
        #: Lengths of the jobs that decode, by their ids.
        self._decoding = {
            job.id: here for job in scheduler.running if len(job.tokens) - (here := length(job.id)) == 1
        }
        self.prefill_rows = scheduler.max_rows - len(self._decoding)
        self.workspace = self._cache.num_workspace
        self.taken_pages = 0
        self.shares: list[tuple[Job, int]] = []

    @property
    def pages(self) -> int:
        """Pool pages that are still to be had."""
        return self._cache.pool.num_available - self.taken_pages

    def take_row(self, job: Job) -> bool:
        """Give a decoding job its row if that completes no page, so that there is nothing to weigh."""
        length = self._decoding.get(job.id)
        if length is None or not (length + 1) % self._cache.page_size:
            return False
        self.shares.append((job, 1))
        return True

    def rows_for(self, job: Job) -> int:
        """Rows that a job can have, pool pages apart."""
        pending = self._scheduler.pending(job)
        if job.id in self._decoding:
            return 1
        size = self._cache.page_size
        room = self.workspace * size + size - self._cache.length(job.id) % size
        return min(pending, self.prefill_rows, room)

    def pages_for(self, job: Job, rows: int) -> int:
        """Pool pages that so many rows of a job seal."""
        return self._cache.pages_needed(job.id, rows)

    def take(self, job: Job, rows: int) -> None:
        """Give a job its rows, as many as the pool pages suffice for."""
        size = self._cache.page_size
        rows = min(rows, (self.pages + 1) * size - 1 - self._cache.length(job.id) % size)
        if rows < 1:
            return
        self.taken_pages += self.pages_for(job, rows)
        self.workspace -= self._cache.workspace_needed(job.id, rows)
        if job.id not in self._decoding:
            self.prefill_rows -= rows
        self.shares.append((job, rows))

    def promised(self) -> int:
        """Pool pages that the running jobs take until nothing of theirs is pending."""
        cache, rows = self._cache, self._scheduler.max_rows
        return sum(
            max(0, cache.most_pages(len(job.tokens), rows) - len(cache.sequence(job.id).pages))
            for job in self._scheduler.running
        )
