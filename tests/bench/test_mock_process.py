import signal
import subprocess
import sys

CODE = """
import sys
from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript
with start_mock_process(MockScript(ttft_s=0.01, gap_s=0.001, tokens=2)) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_a_scripted_server_ends_with_a_starter_that_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert starter.stdin and starter.stdout
    url = starter.stdout.readline().strip()
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(starter.pid)], capture_output=True, text=True, check=True
    )
    (mock,) = map(int, children.stdout.split())
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdin.close()
    starter.stdout.close()
    assert url.startswith("http://127.0.0.1:")
    for _ in range(500):  # gone, or a zombie that nobody has collected yet
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(mock)], capture_output=True, text=True, check=False)
        if state.stdout.strip()[:1] in ("", "Z"):
            return
        subprocess.run(["sleep", "0.02"], check=True)
    raise AssertionError(f"process {mock} is still there: {state.stdout}")
