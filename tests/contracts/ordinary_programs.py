"""200 ordinary programs, as data: what completions do with Python and its standard library. Each
prints the same wherever it runs, so that its output in the sandbox can be held against its output
outside."""

from __future__ import annotations

_SYSTEM = [  # what needs more of the kernel than reading and writing
    "import threading\nfound = []\nts = [threading.Thread(target=found.append, args=(n,)) for n "
    "in range(4)]\n[t.start() for t in ts]; [t.join() for t in ts]\nprint(sorted(found))",
    "import threading\nlock, count = threading.Lock(), [0]\ndef add():\n  for _ in range(1000):\n "
    "   with lock: count[0] += 1\nts = [threading.Thread(target=add) for _ in "
    "range(3)]\n[t.start() for t in ts]; [t.join() for t in ts]\nprint(count)",
    "import threading\ne = threading.Event()\nt = threading.Timer(0.01, e.set); "
    "t.start()\nprint(e.wait(5)); t.join()",
    "import threading\nb = threading.Barrier(3)\nts = [threading.Thread(target=b.wait) for _ in "
    "range(2)]\n[t.start() for t in ts]; b.wait(); [t.join() for t in ts]; print('met')",
    "import threading\nc = threading.Condition()\nq = []\ndef put():\n  with c: q.append(1); "
    "c.notify()\nt = threading.Thread(target=put)\nwith c:\n  t.start(); c.wait_for(lambda: q, "
    "5)\nt.join(); print(q)",
    "import threading\nlocal = threading.local(); local.x = 1\nt = "
    "threading.Thread(target=lambda: print(hasattr(local, 'x'))); t.start(); t.join()",
    "import queue, threading\nq = queue.Queue()\nt = threading.Thread(target=lambda: [q.put(n) "
    "for n in range(5)]); t.start()\nprint([q.get(timeout=5) for _ in range(5)]); t.join()",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(3) as pool: "
    "print(list(pool.map(lambda x: x * x, range(10))))",
    "from multiprocessing.pool import ThreadPool\nwith ThreadPool(2) as pool: print(pool.map(abs, "
    "[-1, -2, 3]))",
    "import multiprocessing as m\nq = m.SimpleQueue()\np = m.Process(target=q.put, args=(7,)); "
    "p.start(); print(q.get()); p.join(); print(p.exitcode)",
    "import multiprocessing as m\na, b = m.Pipe()\np = m.Process(target=b.send, args=({'x': [1, "
    "2]},)); p.start(); print(a.recv()); p.join()",
    "import multiprocessing as m\nv = m.Value('i', 3)\ndef f(v):\n  with v.get_lock(): v.value += "
    "4\np = m.Process(target=f, args=(v,)); p.start(); p.join(); print(v.value)",
    "import multiprocessing as m\na = m.Array('d', 4)\ndef f(a): a[2] = 1.5\np = "
    "m.Process(target=f, args=(a,)); p.start(); p.join(); print(list(a))",
    "import multiprocessing as m, math\nwith m.get_context('fork').Pool(2) as pool: "
    "print(pool.map(math.factorial, range(8)))",
    "from concurrent.futures import ProcessPoolExecutor\nimport math\nwith ProcessPoolExecutor(2) "
    "as pool: print(list(pool.map(math.isqrt, range(0, 100, 9))))",
    "import multiprocessing as m\nl = m.Lock(); print(l.acquire(timeout=1)); l.release()\ne = "
    "m.Event(); e.set(); print(e.is_set())",
    "from multiprocessing import shared_memory as s\ntry:\n  x = s.SharedMemory(create=True, "
    "size=100); x.buf[0] = 5; print(x.buf[0]); x.close(); x.unlink()\nexcept OSError as e: "
    "print(e)",
    "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], "
    "capture_output=True, text=True).stdout)",
    "import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True).stdout)",
    "import subprocess\nprint(subprocess.check_output('echo a | tr a b', shell=True))",
    "import subprocess\np = subprocess.Popen(['cat'], stdin=subprocess.PIPE, "
    "stdout=subprocess.PIPE)\nprint(p.communicate(b'x' * 10))",
    "import subprocess\np = subprocess.Popen(['sleep', '30']); p.terminate(); print(p.wait())",
    "import subprocess\ntry: subprocess.run(['sleep', '30'], timeout=0.05)\nexcept "
    "subprocess.TimeoutExpired as e: print('late')",
    "import os\nprint(os.popen('echo hello').read(), os.system('exit 3') >> 8)",
    "import os\npid = os.fork()\nif pid == 0: "
    "os._exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "import os\npid = os.posix_spawn('/bin/true', ['true'], {})\nprint(os.waitpid(pid, 0)[1])",
    "import os\nr, w = os.pipe()\nif os.fork() == 0:\n  os.write(w, b'child'); "
    "os._exit(0)\nos.wait(); print(os.read(r, 100))",
    "import os, time\npid = os.fork()\nif pid == 0:\n  time.sleep(30)\nos.kill(pid, 9); "
    "print(os.waitpid(pid, 0)[1])",
    "import os, select\npid = os.fork()\nif pid == 0: os._exit(0)\nfd = os.pidfd_open(pid); "
    "print(len(select.select([fd], [], [], 5)[0])); os.waitpid(pid, 0); os.close(fd)",
    "import asyncio\nasync def f(n):\n  await asyncio.sleep(0.001 * n); return n\nasync def "
    "main(): print(await asyncio.gather(*(f(n) for n in range(5))))\nasyncio.run(main())",
    "import asyncio\nasync def main():\n  p = await asyncio.create_subprocess_exec('echo', 'hi', "
    "stdout=-1)\n  print(await p.communicate(), p.returncode)\nasyncio.run(main())",
    "import asyncio\nasync def main(): print(await asyncio.to_thread(sum, [1, 2, "
    "3]))\nasyncio.run(main())",
    "import asyncio\nasync def main():\n  q = asyncio.Queue()\n  async def put():\n    for n in "
    "range(3): await q.put(n)\n  t = asyncio.create_task(put()); print([await q.get() for _ in "
    "range(3)]); await t\nasyncio.run(main())",
    "import asyncio\nasync def main():\n  try: await asyncio.wait_for(asyncio.sleep(9), 0.01)\n  "
    "except asyncio.TimeoutError: print('late')\nasyncio.run(main())",
    "import asyncio\nasync def serve(r, w):\n  w.write((await r.readline()).upper()); await "
    "w.drain(); w.close()\nasync def main():\n  s = await asyncio.start_unix_server(serve, "
    "'a.sock')\n  r, w = await asyncio.open_unix_connection('a.sock')\n  w.write(b'hello\\n'); "
    "print(await r.read()); w.close(); s.close()\nasyncio.run(main())",
    "import tempfile, os\nwith tempfile.NamedTemporaryFile('w+') as f:\n  f.write('x'); "
    "f.seek(0); print(f.read(), os.path.exists(f.name))",
    "import tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n  open(d + '/a', "
    "'w').close(); print(os.listdir(d))\nprint(os.path.exists(d))",
    "import tempfile\nf = tempfile.SpooledTemporaryFile(10); f.write(b'x' * 100); f.seek(0); "
    "print(len(f.read()))",
    "import tempfile\nf = tempfile.TemporaryFile(); f.write(b'abc'); f.seek(1); print(f.read())",
    "import sqlite3\nc = sqlite3.connect(':memory:'); c.execute('create table t (a, "
    "b)')\nc.executemany('insert into t values (?, ?)', [(n, n * n) for n in "
    "range(10)])\nprint(c.execute('select sum(a), max(b) from t').fetchall())",
    "import sqlite3\nc = sqlite3.connect('x.db'); c.execute('create table if not exists t "
    "(a)')\nfor n in range(20):\n  c.execute('insert into t values (?)', (n,)); "
    "c.commit()\nprint(c.execute('select count(*) from t').fetchone()); c.close()",
    "import sqlite3\nc = sqlite3.connect('w.db'); print(c.execute('pragma "
    "journal_mode=wal').fetchone()); c.execute('create table t (a)'); c.execute('insert into t "
    "values (1)'); c.commit(); print(c.execute('select * from t').fetchall()); c.close()",
    "import ctypes\nprint(ctypes.sizeof(ctypes.c_long), ctypes.c_uint8(257).value)\nclass "
    "P(ctypes.Structure): _fields_ = [('x', ctypes.c_int), ('y', ctypes.c_double)]\nprint(P(1, "
    "2.5).y)",
    "import ctypes\nlibc = ctypes.CDLL(None); print(libc.abs(-5), libc.strlen(b'four'))",
    "import ctypes\nF = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int); print(F(lambda x: x + 1)(4))",
    "import mmap\nm = mmap.mmap(-1, 8192); m[0:5] = b'hello'; print(m[0:5], len(m)); m.close()",
    "import mmap\nfor _ in range(50):\n  m = mmap.mmap(-1, 1 << 22); m[0] = 1; "
    "m.close()\nprint('mapped')",
    "import mmap\nopen('m', 'wb').write(b'a' * 5000)\nwith open('m', 'r+b') as f, "
    "mmap.mmap(f.fileno(), 0) as m:\n  m[0:1] = b'z'; m.flush()\nprint(open('m').read(3))",
    "import mmap\nm = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); "
    "m.write(b'x'); m.seek(0); print(m.read(2))",
    "import mmap, os\nm = mmap.mmap(-1, 4096)\nif os.fork() == 0:\n  m[0] = 9; "
    "os._exit(0)\nos.wait(); print(m[0])",
    "import socket\na, b = socket.socketpair(); a.sendall(b'x' * 1000); print(len(b.recv(2000))); "
    "a.close(); b.close()",
    "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.send(b'one'); "
    "a.send(b'two'); print(b.recv(9), b.recv(9))",
    "import socket, os\ns = socket.socket(socket.AF_UNIX); s.bind('u.sock'); s.listen(); c = "
    "socket.socket(socket.AF_UNIX); c.connect('u.sock')\nd, _ = s.accept(); c.send(b'hey'); "
    "print(d.recv(9)); os.unlink('u.sock')",
    "import socket\ns = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
    "s.bind(('127.0.0.1', 0)); print(s.getsockname()[0]); s.close()",
    "import socket\ns = socket.socket(socket.AF_INET6); s.close(); s = "
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1); print(s.gettimeout())",
    "import socket, array, os\na, b = socket.socketpair(); r, w = os.pipe(); socket.send_fds(a, "
    "[b'x'], [w]); m, f, _, _ = socket.recv_fds(b, 9, 2)\nos.write(f[0], b'through'); "
    "print(os.read(r, 99))",
    "import socket\nprint(socket.inet_aton('1.2.3.4'), socket.htons(1), "
    "socket.getaddrinfo('127.0.0.1', 80, type=socket.SOCK_STREAM)[0][4])",
    "import select, os\nr, w = os.pipe(); print(select.select([r], [], [], 0)); os.write(w, "
    "b'x'); print(len(select.select([r], [], [], 1)[0]))",
    "import select, os\nr, w = os.pipe(); p = select.poll(); p.register(r, select.POLLIN); "
    "os.write(w, b'x'); print([e for _, e in p.poll(100)])",
    "import select, os\nr, w = os.pipe(); e = select.epoll(); e.register(r, select.EPOLLIN); "
    "os.write(w, b'x'); print([k for _, k in e.poll(1)]); e.close()",
    "import selectors, socket\na, b = socket.socketpair(); s = selectors.DefaultSelector(); "
    "s.register(b, selectors.EVENT_READ, 'b'); a.send(b'1'); print([k.data for k, _ in "
    "s.select(1)])",
    "import os\nfd = os.eventfd(3); print(os.eventfd_read(fd)); os.close(fd)",
    "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('rang')); signal.alarm(1); "
    "signal.pause(); signal.signal(signal.SIGALRM, signal.SIG_DFL)",
    "import signal, time\nclass Late(Exception): pass\ndef ring(*a): raise "
    "Late\nsignal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.02)\ntry: "
    "time.sleep(5)\nexcept Late: print('late')\nsignal.signal(signal.SIGALRM, signal.SIG_DFL)",
    "import signal, os\nsignal.signal(signal.SIGUSR1, lambda *a: print('one')); "
    "os.kill(os.getpid(), signal.SIGUSR1); signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
    "import signal, os\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}); "
    "os.kill(os.getpid(), signal.SIGUSR2); print(signal.sigwait({signal.SIGUSR2}).name); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})",
    "import time\nt = time.monotonic(); time.sleep(0.01); print(time.monotonic() - t >= 0.01, "
    "time.time() > 1e9, time.perf_counter() > 0, time.process_time() >= 0)",
    "import time\nprint(time.strftime('%Y', time.gmtime(0)), "
    "time.get_clock_info('monotonic').monotonic)",
    "import resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_utime >= 0, "
    "resource.getrlimit(resource.RLIMIT_CORE)[0] >= -1)",
    "import sys\nsys.setrecursionlimit(20000)\ndef f(n): return 0 if n == 0 else 1 + f(n - "
    "1)\nprint(f(15000)); sys.setrecursionlimit(1000)",
    "import sys, threading\nthreading.stack_size(64 << 20)\ndef f(n): return n and f(n - "
    "1)\nsys.setrecursionlimit(30000)\nt = threading.Thread(target=lambda: print(f(20000))); "
    "t.start(); t.join(); threading.stack_size(0); sys.setrecursionlimit(1000)",
    "import os, stat\nopen('p', 'w').write('x'); os.chmod('p', 0o600); s = os.stat('p'); "
    "print(oct(stat.S_IMODE(s.st_mode)), s.st_size); os.rename('p', 'q'); os.link('q', 'r'); "
    "os.symlink('q', 's'); print(os.readlink('s'), sorted(set(os.listdir('.')) & "
    "set('pqrs')))\nfor n in 'qrs': os.unlink(n)",
    "import os, shutil\nos.makedirs('t/u/v'); open('t/u/f', 'w').write('x'); shutil.copytree('t', "
    "'c'); print(sorted(r for r, _, _ in os.walk('c'))); shutil.rmtree('t'); shutil.rmtree('c')",
    "import shutil\nopen('a1', 'wb').write(bytes(300000)); shutil.copy2('a1', 'a2'); "
    "shutil.copyfile('a1', 'a3'); print(len(open('a2', 'rb').read()), "
    "shutil.disk_usage('.').total > 0); shutil.move('a2', 'a4')",
    "import os\nfd = os.open('o', os.O_RDWR | os.O_CREAT); os.write(fd, b'hello'); os.lseek(fd, "
    "1, 0); print(os.read(fd, 2), os.pread(fd, 2, 3)); os.ftruncate(fd, 2); "
    "print(os.fstat(fd).st_size); os.fsync(fd); os.close(fd)",
    "import os\nos.mkfifo('ff')\nif os.fork() == 0:\n  open('ff', 'w').write('through'); "
    "os._exit(0)\nprint(open('ff').read()); os.wait(); os.unlink('ff')",
    "import fcntl\nf = open('lk', 'w'); fcntl.flock(f, fcntl.LOCK_EX); fcntl.flock(f, "
    "fcntl.LOCK_UN); fcntl.lockf(f, fcntl.LOCK_EX); print('locked')",
    "import fcntl, os\nr, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)\ntry: "
    "os.read(r, 1)\nexcept BlockingIOError: print('empty')",
    "import glob, pathlib\nfor n in 'ab': pathlib.Path(n + "
    "'.gg').write_text(n)\nprint(sorted(glob.glob('*.gg')), pathlib.Path('a.gg').read_text(), "
    "pathlib.Path('x/../y').name)",
    "import os\nprint(len(os.urandom(16)), os.cpu_count() > 0, len(os.sched_getaffinity(0)) > 0, "
    "os.getpid() > 0, os.getcwd() == os.path.abspath('.'))",
    "import os\nos.environ['X_Y'] = '1'; print(os.getenv('X_Y'), os.path.expandvars('$X_Y'), "
    "os.umask(0o22) >= 0, os.nice(0) >= 0)",
    "import platform, sys\nprint(platform.python_implementation(), sys.byteorder, "
    "platform.system())",
    "import uuid, secrets\nprint(uuid.uuid5(uuid.NAMESPACE_DNS, 'a'), len(str(uuid.uuid4())), "
    "len(secrets.token_hex(8)))",
    "import os\nprint(os.getuid() == os.geteuid(), os.getgid() == os.getegid(), "
    "len(os.getresuid()))",
    "import zipfile\nwith zipfile.ZipFile('z.zip', 'w') as z: z.writestr('a', 'b' * "
    "100)\nprint(zipfile.ZipFile('z.zip').read('a')[:3])",
    "import tarfile, io\nb = io.BytesIO()\nwith tarfile.open(fileobj=b, mode='w:gz') as t:\n  i = "
    "tarfile.TarInfo('a'); i.size = 3; t.addfile(i, io.BytesIO(b'abc'))\nb.seek(0); "
    "print(tarfile.open(fileobj=b).getnames())",
    "import gzip, bz2, lzma\nd = b'abc' * 1000\nprint([len(m.decompress(m.compress(d))) for m in "
    "(gzip, bz2, lzma)])",
    "import shelve\nwith shelve.open('sh') as s: s['a'] = [1, 2]\nwith shelve.open('sh') as s: "
    "print(s['a'])",
    "import logging, sys\nlogging.basicConfig(stream=sys.stdout, format='%(levelname)s "
    "%(message)s', force=True); logging.warning('w'); logging.info('i')",
    "import atexit, weakref, gc\nclass A: pass\na = A(); r = weakref.ref(a); del a; gc.collect(); "
    "print(r())",
    "import faulthandler, tracemalloc\ntracemalloc.start(); x = [0] * 1000; "
    "print(tracemalloc.get_traced_memory()[0] > 0); tracemalloc.stop()",
    "import cProfile, pstats, io\np = cProfile.Profile(); p.enable(); sum(range(100)); "
    "p.disable(); print(pstats.Stats(p, stream=io.StringIO()).total_calls > 0)",
    "import locale\nprint(locale.setlocale(locale.LC_ALL, 'C'))",
    "import contextvars\nv = contextvars.ContextVar('v', default=1); "
    "print(contextvars.copy_context().run(lambda: v.get()))",
    "import http.server, urllib.parse, "
    "email.message\nprint(urllib.parse.urlsplit('http://a/b?c=d').query, "
    "http.server.HTTPServer.__name__)",
    "import zoneinfo, datetime\nprint(datetime.datetime(2024, 2, 29, "
    "tzinfo=datetime.timezone.utc).isoformat(), datetime.date(2024, 1, 31) + "
    "datetime.timedelta(30))",
    "import importlib, types\nopen('mod_x.py', 'w').write('y = 5')\nimport sys, "
    "os\nsys.path.insert(0, os.getcwd()); importlib.invalidate_caches(); "
    "print(importlib.import_module('mod_x').y)",
    "import pickle, copy\nprint(pickle.loads(pickle.dumps({1: (2, [3])})), copy.deepcopy([[1]]))",
    "import curses.ascii, readline\nprint(curses.ascii.isalpha('a'))",
    "try:\n  import numpy as np\n  print((np.arange(16.0).reshape(4, 4) @ "
    "np.eye(4)).sum())\nexcept ImportError: print('none')",
]
_SHAPES = [  # algorithms, each with several arguments
    (
        "import random\nr = random.Random({0})\nx = [r.randrange(1000) for _ in "
        "range(200)]\nprint(sorted(x)[:10], min(x), max(x), sum(x))",
        (1, 2, 3, 4, 5, 6, 7, 8),
    ),
    (
        "def sieve(n):\n  p = [True] * (n + 1)\n  for i in range(2, int(n ** .5) + 1):\n    if "
        "p[i]: p[i * i::i] = [False] * len(p[i * i::i])\n  return [i for i in range(2, n + 1) if "
        "p[i]]\nprint(len(sieve({0})), sieve({0})[-1])",
        (100, 1000, 5000, 20000, 100000),
    ),
    (
        "from functools import lru_cache\n@lru_cache(None)\ndef fib(n): return n if n < 2 else "
        "fib(n - 1) + fib(n - 2)\nprint(fib({0}))",
        (10, 50, 100, 200, 300),
    ),
    (
        "import re\nprint(re.findall(r'{0}', 'ab12 cd-34 x_5 2024-01-31 a@b.co'))",
        (r"\d+", r"[a-z]+", r"\w+@\w+\.\w+", r"(\d+)-(\d+)-(\d+)", r"\b\w"),
    ),
    (
        "import hashlib\nprint(hashlib.new('{0}', b'gyre' * 1000).hexdigest())",
        ("md5", "sha1", "sha256", "sha512", "blake2b", "sha3_256"),
    ),
    (
        "import json\nd = {{'k': [{0}, None, True, 1.5, 'é']}}\nprint(json.dumps(d, "
        "sort_keys=True), json.loads(json.dumps(d)) == d)",
        (0, 1, -5, 10**30, 2.5),
    ),
    (
        "import zlib\nprint(len(zlib.compress(b'abc' * {0})), zlib.crc32(b'x' * {0}))",
        (1, 100, 10000, 100000),
    ),
    (
        "from decimal import Decimal, getcontext\ngetcontext().prec = {0}\nprint(Decimal(1) / 7, "
        "Decimal(2).sqrt())",
        (5, 28, 100, 500),
    ),
    (
        "from fractions import Fraction\nprint(sum(Fraction(1, n) for n in range(1, {0})))",
        (5, 20, 60),
    ),
    (
        "import math\nprint(math.comb({0}, 7), math.gcd({0}, 36), math.isqrt({0}), "
        "round(math.log({0}), 9), math.factorial({0}) % 1000007)",
        (8, 50, 144, 1000),
    ),
    (
        "import heapq, bisect\nx = [(n * {0}) % 101 for n in "
        "range(100)]\nheapq.heapify(x)\nprint([heapq.heappop(x) for _ in range(5)], "
        "bisect.bisect(sorted(x), 50))",
        (3, 7, 11, 13),
    ),
    (
        "from collections import Counter, deque, defaultdict, OrderedDict\nc = "
        "Counter('{0}')\nprint(c.most_common(3), deque('{0}', 3), sorted(c))",
        ("banana", "mississippi", "abcabc", "zz"),
    ),
    (
        "from itertools import permutations, combinations, product, accumulate, "
        "groupby\nprint(len(list(permutations(range({0})))), list(combinations(range({0}), "
        "2))[:3], list(accumulate(range({0}))))",
        (2, 3, 5, 7),
    ),
    (
        "def solve(n, row=0, cols=0, d1=0, d2=0):\n  if row == n: return 1\n  return sum(solve(n, "
        "row + 1, cols | 1 << c, d1 | 1 << row + c, d2 | 1 << row - c + n) for c in range(n) if "
        "not (cols >> c & 1 or d1 >> row + c & 1 or d2 >> row - c + n & 1))\nprint(solve({0}))",
        (4, 5, 6, 7),
    ),
    (
        "n = {0}\na = [[(i * j + i) % 7 for j in range(n)] for i in range(n)]\nb = [[sum(x * y "
        "for x, y in zip(r, c)) for c in zip(*a)] for r in a]\nprint(sum(map(sum, b)))",
        (2, 10, 30, 50),
    ),
    (
        "def lcs(a, b):\n  t = [0] * (len(b) + 1)\n  for x in a:\n    p = 0\n    for j, y in "
        "enumerate(b, 1): p, t[j] = t[j], p + 1 if x == y else max(t[j], t[j - 1])\n  return "
        "t[-1]\nprint(lcs('{0}' * 20, 'abcde' * 20))",
        ("ace", "edcba", "abc", "xyz"),
    ),
    (
        "import string, textwrap\ns = 'The quick brown fox jumps over the lazy dog ' * "
        "{0}\nprint(textwrap.shorten(s, 40), len(s.split()), s.title()[:20], "
        "s.translate(str.maketrans('aeiou', '12345'))[:30])",
        (1, 2, 5),
    ),
    (
        "import statistics\nx = [n * n % {0} for n in range(1, 50)]\nprint(statistics.mean(x), "
        "statistics.median(x), round(statistics.pstdev(x), 9))",
        (7, 11, 19),
    ),
    (
        "import struct, array\nprint(struct.pack('{0}', 7), struct.calcsize('{0}'), "
        "array.array('i', [1, 2]).tobytes())",
        ("<i", ">q", "<H", "<d"),
    ),
    (
        "from dataclasses import dataclass, asdict\nfrom enum import Enum\nclass E(Enum): A = "
        "{0}\n@dataclass(order=True)\nclass P:\n  x: int\n  y: int = {0}\nprint(asdict(P(1)), "
        "P(1) < P(2), E.A, E({0}))",
        (1, 2, 3),
    ),
    (
        "import datetime\nd = datetime.date(2024, 1, 1) + "
        "datetime.timedelta(days={0})\nprint(d.isoformat(), d.strftime('%A %j'), "
        "d.isocalendar()[1])",
        (0, 59, 365, 1000),
    ),
    (
        "def collatz(n):\n  k = 0\n  while n != 1: n, k = (n // 2 if n % 2 == 0 else 3 * n + 1), "
        "k + 1\n  return k\nprint(collatz({0}), max(range(1, 500), key=collatz))",
        (27, 97, 871),
    ),
    (
        "from collections import deque\nn = {0}\nseen, q = {{(0, 0): 0}}, deque([(0, 0)])\nwhile "
        "q:\n  x, y = q.popleft()\n  for a, b in ((x + 1, y), (x, y + 1), (x - 1, y), (x, y - "
        "1)):\n    if 0 <= a < n and 0 <= b < n and (a * b) % 3 != 1 and (a, b) not in seen: "
        "seen[a, b] = seen[x, y] + 1; q.append((a, b))\nprint(len(seen), max(seen.values()))",
        (3, 10, 30),
    ),
    (
        "import base64, binascii, csv, io\nb = base64.b64encode(b'{0}'); print(b, "
        "base64.b64decode(b), binascii.hexlify(b'{0}'))\nf = io.StringIO(); "
        "csv.writer(f).writerow(['{0}', 'a,b', 1]); print(f.getvalue())",
        ("a", "hello", "x y"),
    ),
    (
        "try:\n  {0}\nexcept Exception as e: print(type(e).__name__, e)",
        (
            "1 / 0",
            "[][1]",
            "{{}}['a']".replace("{{", "{").replace("}}", "}"),
            "int('x')",
            "None.x",
            "'a' + 1",
        ),
    ),
]
PROGRAMS = [*_SYSTEM, *(shape.format(value) for shape, values in _SHAPES for value in values)]
