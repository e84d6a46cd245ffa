-- The runs: reads a run and its charges. The files of the algorithms stand within these loops, which end in the driver.

-- The rules, one for each algorithm: (key, callers, rest, cost, quota, three parameters, `reserve`) -> how many callers are
-- counted, what remains, the wait, the time to a full reset. A rule reads its key, finds how many of the callers fit, and adds
-- their weight.
local log, counter, fixed, bucket, concurrency, ban
-- The rule of a log that is not plain, when a charge has needed it, what makes it, and what both logs share.
local weighted, make_weighted, admit
-- What the rules of keys of numbers share, and all rules.
local fetch, write, keep
-- Called by the rule of a charge that does not decide alone, when it has read its key: (room, how many callers fit, cost,
-- quota) -> how many callers are counted, whether the next one has to wait, for a refund when it was admitted. It decides the
-- charges after that one, so all keys of a request are read before anything is added to one. By role: none, `checked`, `once`.
local rest, checked, marker
-- In a run of `reserve`, what it needs beside that, else nil: the functions and values that `lua/charges.lua` lists.
local reserve, reservations

-- Of the request: how many callers send it, for a refund when it was admitted, unless it was repeated, how many callers fit the
-- charges so far, the charges that follow, linked, the position of the last key that was read, and whether a ban is in force.
local operation, times, refunded_at, fits, following, at, banned

for run = 1, #ARGV do
  local requests, size, position
  local admitted_at
  operation, requests, size, times, position = unpack_numbers('<sddd', ARGV[run])
  if operation == 'refund' then
    admitted_at, position = unpack_numbers('<d', ARGV[run], position)
  elseif operation == 'within' then
    if now < requests or now >= size then
      return pack('<d', now)
    end
    size = 0
  end

  -- The last charge that was read, and all of them, linked, unless this one decides alone.
  local rule, cost, quota, x, y, z
  local all, last
  for place = 1, size do
    local algorithm, role
    algorithm, role, cost, quota, x, y, z, position = unpack_numbers('<ssddddd', ARGV[run], position)
