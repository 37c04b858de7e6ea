import threading

from trackway.trainer.delivery.sinks import JobQueue


def test_jobs_run_in_order_and_close_waits_for_them():
    done: list[int] = []
    background = JobQueue("test")

    for number in range(20):
        background.submit(lambda number=number: done.append(number))
    background.close(10)

    assert done == list(range(20))
    assert (background.failed, background.dropped) == (0, 0)


def test_a_job_that_fails_is_counted_and_the_next_one_runs():
    done: list[str] = []
    background = JobQueue("test")

    background.submit(lambda: 1 / 0)
    background.submit(lambda: done.append("after"))
    background.close(10)

    assert (done, background.failed) == (["after"], 1)


def test_a_full_queue_drops_instead_of_blocking():
    gate = threading.Event()
    background = JobQueue("test", capacity=1)
    background.submit(lambda: gate.wait(60))

    for _ in range(5):
        background.submit(lambda: None)
    gate.set()
    background.close(10)

    assert background.dropped >= 3


def test_close_gives_up_at_its_deadline():
    gate = threading.Event()
    background = JobQueue("test")
    background.submit(lambda: gate.wait(60))
    background.submit(lambda: None)

    background.close(0.1)

    assert background.dropped >= 1
    gate.set()
