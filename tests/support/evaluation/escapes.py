"""Programs that try to leave the sandbox, or to do harm in it: each ends without an exception only if it could.

HOME is a folder of the user with ``secret`` and ``thesis/x.txt``; TCP, UDP, SOCKET, ABSTRACT and DATAGRAMS are sockets
that listen; VICTIM is a process of the same user, PARENT is hlat. ``call`` is a system call, which raises OSError.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRELUDE = """
import os, socket, struct
def call(x86_64, aarch64, *arguments):
    import ctypes
    library = ctypes.CDLL(None, use_errno=True)
    number = x86_64 if os.uname().machine == "x86_64" else aarch64
    typed = [a if isinstance(a, bytes) else ctypes.c_size_t(a % 2**64) for a in arguments]
    result = library.syscall(ctypes.c_long(number), *typed)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""

FILES = {
    "read /etc/passwd": "open('/etc/passwd').read()",
    "read a secret file": "open('HOME/secret').read()",
    "list the user's folder": "os.listdir('HOME')",
    "list /": "assert 'home' in os.listdir('/')",
    "delete a folder": "import shutil; shutil.rmtree('HOME/thesis'); assert not os.path.exists('HOME/thesis')",
    "delete a file": "os.unlink('HOME/thesis/x.txt')",
    "overwrite a file": "open('HOME/secret', 'w').write('x')",
    "append to .bashrc": "open('HOME/.bashrc', 'a').write('x')",
    "write authorized_keys": "os.makedirs('HOME/.ssh'); open('HOME/.ssh/authorized_keys', 'a').write('k')",
    "rename a file": "os.rename('HOME/secret', 'HOME/other')",
    "move a file here": "os.rename('HOME/secret', 'mine')",
    "chmod": "os.chmod('HOME/secret', 0o666)",
    "chmod of a descriptor": "os.fchmod(os.open('HOME/secret', os.O_RDONLY), 0o666)",
    "chown": "os.chown('HOME/secret', os.getuid(), os.getgid())",
    "change times": "os.utime('HOME/secret', (0, 0))",
    "truncate": "os.truncate('HOME/secret', 0)",
    "truncate while opening for reading": "os.open('HOME/secret', os.O_RDONLY | os.O_TRUNC)",
    "extended attributes": "os.setxattr('HOME/secret', 'user.x', b'1')",
    "hard link": "os.link('HOME/secret', 'mine'); open('mine').read()",
    "symbolic link": "os.symlink('HOME/secret', 'mine'); open('mine', 'w').write('x')",
    "write outside the folder": "open('/var/tmp/hlat-escape', 'w').write('x'); os.unlink('/var/tmp/hlat-escape')",
    "many files in HOME": "for i in range(20): open(f'HOME/f{i}', 'w').write('x' * 1000000)",
    "many files here": "for i in range(100): open(f'f{i}', 'w').write('x' * 1000000)\nimport time; time.sleep(1)",
    "a large file": "open('x', 'wb').write(bytes(2 << 20))",
    "nested folders": "for i in range(2000): os.mkdir('d'); os.chdir('d')",
    "shared memory": "open('/dev/shm/hlat-escape', 'w').write('x'); os.unlink('/dev/shm/hlat-escape')",
    "a pipe with a name": "os.mkfifo('pipe')",
    "a device": "os.mknod('disk', 0o60666, os.makedev(8, 0))",
    "write to Python's library": "open(os.__file__, 'r+').close()",
    "cgroups": "assert os.listdir('/sys/fs/cgroup')",
    "the terminal": "open('/dev/tty', 'w').write('x')",
    "watch files (inotify)": "call(254, 27, call(294, 26, 0), b'HOME\\0', 0x100)",
    "watch files (fanotify)": "call(300, 262, 0, 0)",
    "handle of a file": "call(303, 264, -100 % 2**64, b'HOME\\0', struct.pack('Ii', 128, 0) + bytes(128), bytes(8), 0)",
    "chroot": "os.chroot('/')",
}
NETWORK = {
    "TCP": "socket.create_connection(('127.0.0.1', TCP), 2)",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "DNS": "socket.getaddrinfo('localhost', 80, proto=socket.IPPROTO_TCP)",
    "a Unix socket": "socket.socket(socket.AF_UNIX).connect('SOCKET')",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')",
    "datagrams from a pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '\\0DATAGRAMS')",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "ciphers of the kernel": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "/dev/tcp of bash": "assert not os.system('bash -c \"exec 3<>/dev/tcp/127.0.0.1/TCP\"')",
}
PROCESSES = {
    "fork": "pid = os.fork()\nif not pid: os._exit(0)",
    "clone": "pid = call(56, 220, 17, 0, 0, 0, 0)\nif not pid: os._exit(0)",
    "clone3": "pid = call(435, 435, struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64)\nif not pid: os._exit(0)",
    "a thread": "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    "a daemon": "import time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(5)\n  os._exit(0)",
    "a fork bomb": "for i in range(64):\n  if os.fork() == 0:\n    import time; time.sleep(1); os._exit(0)",
    "a new session": "os.setsid()",
    "exec": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "exec of a program with another user's rights": "if not os.fork():\n"
    "  os.execv('/bin/su', ['su', '--help'])\nassert os.wait()[1] == 0",
    "code in memory": "os.memfd_create('x')",
    "exec of code in memory": "import shutil; f = os.memfd_create('x'); os.write(f, open('/bin/true', 'rb').read())\n"
    "if os.fork() == 0: os.execve(f, ['x'], {})\nassert os.wait()[1] == 0",
    "see hlat": "os.kill(PARENT, 0)",
    "see the parent": "os.kill(os.getppid(), 0)",
    "signal to all": "os.kill(-1, 0)",
    "signal to the group": "os.killpg(0, 0)",
    "kill another process": "os.kill(VICTIM, 9)",
    "kill with a file's owner": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 8, VICTIM)\n"
    "fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
    "descriptor of a process": "os.pidfd_open(VICTIM)",
    "limits of another process": "import resource; resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))",
    "priority of another process": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "processors of another process": "os.sched_setaffinity(VICTIM, [0])",
    "environment of hlat": "open('/proc/PARENT/environ').read()",
    "environment of the parent": "open(f'/proc/{os.getppid()}/environ').read()",
    "memory of hlat": "open('/proc/PARENT/mem', 'rb')",
    "own memory": "open('/proc/self/mem', 'rb')",
    "descriptors of hlat": "os.listdir('/proc/PARENT/fd')",
    "list of processes": "os.listdir('/proc')",
    "ptrace": "call(101, 117, 16, VICTIM, 0, 0)",
    "ptrace (seize)": "call(101, 117, 0x4206, VICTIM, 0, 0)",
    "process_vm_readv": "call(310, 270, VICTIM, struct.pack('QQ', 0, 0), 0, struct.pack('QQ', 0, 0), 0, 0)",
    "signal with data": "call(129, 138, VICTIM, 0, struct.pack('iii', 0, 0, -1) + bytes(116))",
}
KERNEL = {
    "user namespace": "call(272, 97, 0x10000000)",
    "mount in a user namespace": "call(272, 97, 0x10020000); call(165, 40, b'x\\0', b'/mnt\\0', b'tmpfs\\0', 0, 0)",
    "network namespace": "call(272, 97, 0x40000000)",
    "enter a namespace": "call(308, 268, os.open('/proc/PARENT/ns/net', os.O_RDONLY), 0)",
    "io_uring": "call(425, 425, 8, bytes(120))",
    "userfaultfd": "call(323, 282, 1)",
    "keyctl": "call(250, 219, 0, -3, 1)",
    "add_key": "call(248, 217, b'user\\0', b'x\\0', b'y', 1, -2)",
    "bpf": "call(321, 280, 0, struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(100), 120)",
    "perf_event_open": "call(298, 241, struct.pack('IIQ', 1, 112, 0) + bytes(96), 0, -1, -1, 0)",
    "personality": "call(135, 92, 0x0040000)",
    "System V shared memory": "call(31, 195, call(29, 194, 0, 4096, 0o1600), 0, 0)",
    "System V queue": "call(71, 187, call(68, 186, 0, 0o1600), 0, 0)",
    "System V semaphores": "call(66, 191, call(64, 190, 0, 1, 0o1600), 0, 0)",
    "POSIX queue": "call(240, 180, b'hlat-escape\\0', 0o102, 0o600, 0); call(241, 181, b'hlat-escape\\0')",
    "dumpable again": "call(157, 167, 4, 1, 0, 0, 0)",
    "survive hlat": "call(157, 167, 1, 0, 0, 0, 0)",
    "host name": "socket.sethostname(socket.gethostname())",
    "I/O priority": "call(251, 30, 1, VICTIM, 0x6000)",
    "locked memory": "call(151, 230, 1)",
    "name of the host's user": "import pwd; assert pwd.getpwuid(os.getuid())",
}
RESOURCES = {
    "memory": "x = bytearray(3 << 30)",
    "processor": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "more open files": "x = [os.open('/dev/null', os.O_RDONLY) for i in range(100)]",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))",
    "recursion": "import sys; sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()",
    "a long traceback": "def f(n): return f(n - 1) if n else 1 / 0\nf(900)",
    "a long message": "raise ValueError('x' * 100_000_000)",
    "environment": "assert 'SECRET_OF_TESTS' in os.environ",
    "abort": "os.abort()",
}
ESCAPES = {
    f"{group}: {name}": program
    for group, programs in (
        ("files", FILES),
        ("network", NETWORK),
        ("processes", PROCESSES),
        ("kernel", KERNEL),
        ("resources", RESOURCES),
    )
    for name, program in programs.items()
}

WRONG = "def f(x):\n    return 3\n"
TESTS = "import math\nTOLERANCE = 1e-6\ndef check(g):\n    assert abs(g(1) - 2) < TOLERANCE and g(1) == f(1)\n    "
TESTS += "assert [len(str(g(1)))] == [1], 'wrong'\ncheck(f)"
FORGERIES = {
    "wrong": "",
    "early exit": "import os; os._exit(0)",
    "exit": "raise SystemExit(0)",
    "exit in the function": "def f(x): raise SystemExit(0)",
    "early exit in the function": "import os\ndef f(x): os._exit(0)",
    "equal to all": "class Any(int):\n  __eq__ = __lt__ = __le__ = lambda *a: True\n  __sub__ = lambda a, b: 0\n"
    "def f(x): return Any(3)",
    "an object equal to all": "class Any:\n  __eq__ = __lt__ = __le__ = __abs__ = __sub__ = lambda *a: Any()\n"
    "  __bool__ = lambda a: True\ndef f(x): return Any()",
    "check is replaced": "def check(g): pass",
    "TOLERANCE is replaced": "TOLERANCE = 100",
    "built-in functions are replaced": "abs = lambda *a: 0\nimport builtins\nbuiltins.abs = abs",
    "AssertionError is replaced": "import builtins\nbuiltins.AssertionError = AssertionError = type",
    "a module is replaced": "import sys, types\nsys.modules['math'] = types.SimpleNamespace()",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n  for v in frame.f_locals.values():\n"
    "    if isinstance(v, (bytes, str)):\n      for d in range(40):\n        try: __import__('os').write(d, v)\n"
    "        except Exception: pass\n  frame = frame.f_back",
    "all descriptors": "import os\nfor d in range(64):\n"
    "  try: os.write(d, b'passed')\n  except OSError: pass\nos._exit(0)",
    "all objects": "import gc, os\nfor o in gc.get_objects():\n  if isinstance(o, dict) and 'verdict' in o: 1 / 0\n"
    "for d in range(3, 40):\n  try: os.write(d, b'passed')\n  except OSError: pass",
    "replies in advance": "from inside.values import *\n"
    "for i in range(9): write_frame(4, to_bytes(('value', None, None), id)); write_frame(4, b't1:1')",
    "the reply itself": "from inside import values, judge, program\n"
    "program._answer = lambda *a: b't1:1'\nvalues.to_bytes = program.to_bytes = lambda *a: b't1:1'",
    "the tests are read": "import os\ntests = os.read(0, 9999)\nassert tests\ndef f(x): return 2",
    "the other process is killed": "import os, signal\nos.kill(os.getppid(), 9)",
    "the other process is stopped": "import os, signal\ndef f(x): os.kill(os.getppid(), 19)",
    "a long answer": "def f(x): return 'x' * (200 << 20)",
    "a deep answer": "def f(x):\n  a = []\n  for i in range(100000): a = [a]\n  return a",
    "an answer that contains itself": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "an exception of a class equal to all": "class E(Exception):\n  __eq__ = lambda *a: True\ndef f(x): raise E",
    "an exception that lets the process end": "class SystemExit(BaseException): pass\ndef f(x): raise SystemExit(0)",
}

LIST = "class Own:\n  def __init__(self, *v): self.v = [*v]\n  def __getitem__(self, i): return self.v[i]\n"
LIST += "  def sort(self, key): self.v.sort(key=key)\n"
CAUGHT = "try: f(1)\nexcept Exception: pass"
FAULTS = {  # programs and tests of which they fail
    "no slices": ("from collections import deque\ndef f(x): return deque([1, x])", "assert f(1)[0:2] == [1, 1]"),
    "own sort": (LIST + "def f(x): return Own(2, 1)", "f(1).sort(key=lambda item: item)"),
    "own keys": (LIST + "def f(x): return Own(2, 1)", "f(1)[lambda: 1]"),
    "exception passed back": (
        "def f(x): raise ValueError\ndef g(e): return 1",
        "try: f(1)\nexcept ValueError as error: assert g(error) == 1",
    ),
    "StopIteration in map": ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 5, [1, 2]))"),
    "own StopIteration": ("class E(StopIteration): pass\ndef f(x): raise E", "assert all(map(f, [1, 2]))"),
    "GeneratorExit": (
        "def f(x): raise GeneratorExit",
        "def g():\n  try: yield\n  finally: assert f(1) == 2\ng = g(); next(g); g.close()",
    ),
    "exit for an exception": ("def f(x): raise SystemExit", CAUGHT),
    "KeyboardInterrupt for an exception": ("def f(x): raise KeyboardInterrupt", CAUGHT),
    "unwritable answer for an exception": ("def f(x):\n  a = []\n  a.append(a)\n  return a", CAUGHT),
    "huge answer for an exception": ("def f(x): return 'x' * (300 << 20)", CAUGHT),
    "deep answer for an exception": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(x):\n  a = []\n  for i in range(5000): a = [a]\n  return a",
        CAUGHT,
    ),
}


@contextmanager
def victim(home: Path) -> Iterator[dict[str, str]]:
    """Start what escapes aim at; yield the words to put into their sources."""
    os.environ["SECRET_OF_TESTS"] = "1"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    name = f"hlat-{os.getpid()}"
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    unix.bind(str(home / "socket"))
    abstract.bind(f"\0{name}")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(f"\0{name}-d")
    unix.listen()
    abstract.listen()
    words = {"HOME": str(home), "SOCKET": str(home / "socket"), "ABSTRACT": name, "DATAGRAMS": f"{name}-d"}
    words |= {"TCP": str(tcp.getsockname()[1]), "UDP": str(udp.getsockname()[1])}
    try:
        yield words | {"VICTIM": str(process.pid), "PARENT": str(os.getpid())}
    finally:
        for each in (tcp, udp, unix, abstract, datagrams):
            each.close()
        process.send_signal(signal.SIGKILL)
        process.wait()


def aimed(program: str, words: dict[str, str]) -> str:
    """Put the words into the source of an escape."""
    for word, value in words.items():
        program = program.replace(word, value)
    return PRELUDE + program


def furnish(home: Path) -> None:
    """Write the files of the user, as they were."""
    (home / "thesis").mkdir(exist_ok=True)
    for file, text in (("thesis/x.txt", "work"), ("secret", "S")):
        (home / file).write_text(text)
        (home / file).chmod(0o600)


def changed(home: Path) -> list[str]:
    """Return what is not as ``furnish`` wrote it."""
    found = {str(p.relative_to(home)) for p in home.rglob("*")} ^ {"thesis", "thesis/x.txt", "secret", "socket"}
    for file, text in (("thesis/x.txt", "work"), ("secret", "S")):
        place = home / file
        if place.exists() and (place.read_text() != text or place.stat().st_mode & 0o777 != 0o600):
            found.add(file)
    return sorted(found)
