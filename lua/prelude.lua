-- Decides a batch of requests at one instant of the server's own clock.
--
-- KEYS  the keys of the charges, request after request, then those of their lines; of a call across slots of a cluster, the first
--       of them
-- ARGV  runs of requests that look alike. Words end with a zero byte, numbers are little-endian doubles:
--       run     operation, how many requests, how many charges each has, how many callers send each of them (0: a number
--               for each request follows the charges); for a refund when it was admitted; for `wait` and `peek` the process, how
--               many of its requests stand in the line and one more (0: it has just arrived), and for each of them when it has
--               arrived and its cost; and the charges
--       charge  algorithm, cost, quota, three parameters of the algorithm, and for a calendar four boundaries. The bans of a
--               charge come before it, in its form, with the length of a ban to begin as the cost
--       line    before a charge for which requests may wait: `line`, the longest wait, the cost that waits in the process behind
--               its place, the number of the line, the time in which the whole quota returns (0: it is not known), and 1 where the
--               requests are the first of their process in this line
--       Where there are calendars, the first argument is `within` and the time that the boundaries of all of them enclose.
--       Of a call across slots, each run has, after the callers, 1 where a request has keys in several slots. The keys follow
--       the runs, and the last argument is `across` and the number of runs.
-- reply little-endian doubles in one string: the time in microseconds, then for each charge of each request: how many of
--       its callers are admitted, remaining, the wait of the next caller (0: this charge fits), the time to a full reset;
--       the time alone where it is not within the boundaries, and then nothing was done.
--       Where requests failed, which have added nothing, a list: that string, with -n in place of the callers of the
--       nth of them, and the texts of their errors (`WRONGTYPE Operation ...`)
--
-- Times are microseconds and, like all numbers here, integers below 2^53. Names in capitals are constants, which the store
-- replaces by their values.
--
-- A call of one check spends more on what is made here than on the check: a function costs a tenth of a command, a number as
-- text most of one. So `lua/runs.lua` finds which rules the call needs, and the files after it make no others. What few charges
-- need is made by a function `make_..`, once one does.

local replicate_commands = redis.replicate_commands
if replicate_commands then
  replicate_commands()
end

local call, pack, unpack_numbers = redis.call, struct.pack, struct.unpack

-- Two texts, or two numbers in Dragonfly.
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- The argument of PEXPIREAT for a key that matters until then. In two halves, which fit where a C long has 32 bits; whole numbers,
-- since Lua 5.4 formats no others as such.
local function expiry(at)
  at = at + SLACK
  local rest = at % 1000000
  return string.format('%d%03d', (at - rest) / 1000000, (rest - rest % 1000) / 1000)
end
