"""The system calls that candidates may not make: by protection, their numbers on x86_64 and aarch64 (``-``: none)."""

from __future__ import annotations

from collections.abc import Mapping

_TABLE = """
network: socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
         setsockopt 54 208, sendmsg 46 211, sendmmsg 307 269

processes: fork 57 -, vfork 58 -

pids: kill 62 129, tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424,
      pidfd_open 434 434

ptrace: ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
        process_madvise 440 440

namespaces: unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
            fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, move_mount 429 429, open_tree 428 428,
            mount_setattr 442 442, open_by_handle_at 304 265, name_to_handle_at 303 264

ipc: shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
     msgctl 71 187, semget 64 190, semop 65 193, semtimedop 220 192, semctl 66 191, mq_open 240 180, mq_unlink 241 181,
     mq_timedsend 242 182, mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185, memfd_create 319 279,
     memfd_secret 447 447

kernel: bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
        io_uring_register 427 427, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105,
        finit_module 313 273, delete_module 176 106, keyctl 250 219, add_key 248 217, request_key 249 218,
        personality 135 92, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143, setresuid 117 147,
        setresgid 119 149, setfsuid 122 151, setfsgid 123 152, setgroups 116 159, capset 126 91, quotactl 179 60,
        quotactl_fd 443 443, acct 163 89, swapon 167 224, swapoff 168 225, reboot 169 142, sethostname 170 161,
        setdomainname 171 162, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171,
        syslog 103 116, fanotify_init 300 262, fanotify_mark 301 263, lookup_dcookie 212 18, iopl 172 -,
        ioperm 173 -, modify_ldt 154 -, uselib 134 -, nfsservctl 180 42, vhangup 153 58, sysfs 139 -, _sysctl 156 -,
        ustat 136 -, create_module 174 -, get_kernel_syms 177 -, query_module 178 -, migrate_pages 256 238,
        io_setup 206 0, io_destroy 207 1, io_submit 209 2, io_cancel 210 3, io_getevents 208 4, io_pgetevents 333 292,
        inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27, inotify_rm_watch 255 28,
        move_pages 279 239, mbind 237 235, set_mempolicy 238 237, set_mempolicy_home_node 450 450
"""


def _parse(table: str) -> dict[str, dict[str, tuple[int | None, ...]]]:
    found: dict[str, dict[str, tuple[int | None, ...]]] = {}
    for paragraph in table.strip().split("\n\n"):
        protection, _, calls = paragraph.partition(":")
        rows = (entry.split() for entry in calls.split(","))
        found[protection] = {name: tuple(None if n == "-" else int(n) for n in numbers) for name, *numbers in rows}
    return found


REFUSED: Mapping[str, Mapping[str, tuple[int | None, ...]]] = _parse(_TABLE)

# Column of the numbers above, AUDIT_ARCH of linux/audit.h, and the numbers of calls with special rules.
ARCHITECTURES = {
    "x86_64": (0, 0xC000003E, {"clone": 56, "clone3": 435, "ioctl": 16}),
    "aarch64": (1, 0xC00000B7, {"clone": 220, "clone3": 435, "ioctl": 29}),
}
