/* The first process of a guest on aarch64: for each number of a system call, and for the calls whose arguments the filter
   looks at, a child installs the filter whose bytes are in filter.h, makes the call, and says what it answered:
   ALLOWED (it came to the kernel), REFUSED (EPERM by the filter), or KILLED. Raw calls alone, so that none is made that is
   not meant. */

#include <stddef.h>

struct sock_fprog { unsigned short len; const void *filter; };

static const unsigned char program[] __attribute__((aligned(8))) = {
#include "filter.h"
};

enum { WRITE = 64, EXIT = 94, CLONE = 220, WAIT4 = 260, PRCTL = 167, REBOOT = 142, GETPID = 172 };

static long call(long n, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = n, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}

static void say(const char *text)
{
	size_t size = 0;
	while (text[size])
		size++;
	call(WRITE, 1, (long)text, size, 0, 0, 0);
}

static void say_number(long number)
{
	char digits[24];
	int at = 23;
	int below = number < 0;
	digits[at] = 0;
	if (below)
		number = -number;
	do
		digits[--at] = '0' + number % 10;
	while (number /= 10);
	if (below)
		digits[--at] = '-';
	say(digits + at);
}

/* In a child: after the filter, make the call and tell its answer by the exit status: 0 allowed, 1 refused. The arguments
   of calls that are tried by number alone are such that the kernel itself refuses them with another error than EPERM, or
   answers at once. */
static void try(const char *name, long n, long a, long b, long c, long d)
{
	static const struct sock_fprog whole = {sizeof program / 8, program};
	int status = 0;
	long child = call(CLONE, 17, 0, 0, 0, 0, 0);
	if (child == 0) {
		if (call(PRCTL, 38, 1, 0, 0, 0, 0) || call(PRCTL, 22, 2, (long)&whole, 0, 0, 0))
			call(EXIT, 9, 0, 0, 0, 0, 0);
		long answer = call(n, a, b, c, d, 0, 0);
		call(EXIT, answer == -1 ? 1 : 0, 0, 0, 0, 0, 0);
	}
	call(WAIT4, child, (long)&status, 0, 0, 0, 0);
	say(name);
	say(" ");
	say_number(n);
	say(status & 127 ? " KILLED " : (status >> 8) == 0 ? " ALLOWED " : (status >> 8) == 1 ? " REFUSED " : " UNFILTERED ");
	say_number(status);
	say("\n");
}

void _start(void)
{
	static char byte;
	/* By number, with arguments that fit nothing; those whose arguments count, or which end the process, by name. */
	say("BEGIN\n");
	for (long n = 0; n < 470; n++)
		if (n != 93 && n != 94 && n != 63 && n != 64 && n != 222 && n != 226)
			try("number", n, -1, -1, -1, -1);
	try("exit", 93, 0, 0, 0, 0);
	try("exit_group", 94, 0, 0, 0, 0);
	try("read_0", 63, 0, (long)&byte, 0, 0);
	try("read_1", 63, 1, (long)&byte, 0, 0);
	try("read_3", 63, 3, (long)&byte, 0, 0);
	try("write_1", 64, 1, (long)&byte, 0, 0);
	try("write_0", 64, 0, (long)&byte, 0, 0);
	try("write_2", 64, 2, (long)&byte, 0, 0);
	try("mmap_rw", 222, 0, 4096, 3, 0x22);
	try("mmap_exec", 222, 0, 4096, 7, 0x22);
	try("mprotect_r", 226, 0, 4096, 1, 0);
	try("mprotect_exec", 226, 0, 4096, 5, 0);
	try("x32", 0x40000000 | GETPID, 0, 0, 0, 0);
	say("END\n");
	call(REBOOT, (long)0xfee1dead, 672274793, 0x4321fedc, 0, 0, 0);
	for (;;)
		;
}
