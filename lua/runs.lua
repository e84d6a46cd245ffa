-- The runs: reads a run and its charges. The files of the algorithms stand within these loops, which end in the driver.

-- The rules, one for each algorithm: (key, times, rest, cost, quota, three parameters) -> how many callers are counted, what
-- remains, the wait, the time to a full reset. A rule reads its key, finds how many of the callers fit, and adds their weight.
-- Where the charge is not all that decides, `rest` finds how many are counted.
local log, counter, fixed, bucket
-- What the rules of keys of numbers share.
local fetch, write, keep
-- Decides the charges after one that has read its key; it is called with the room for that one, how many callers fit, its cost
-- and its quota. Returns how many are counted and whether the next caller has to wait; for a refund, when it was admitted.
-- So all keys of a request are read before anything is added to one.
local rest

-- Of the request that is decided: how many callers send it, how many of them fit all charges so far, the charges that follow
-- (linked), the position of the last key, the role of its charge and whether that is exempt.
local operation, times, admitted_at
local fits, following, at, role, exempt

for run = 1, #ARGV do
  local requests, size, position
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
    local algorithm
    algorithm, role, cost, quota, x, y, z, position = unpack_numbers('<ssddddd', ARGV[run], position)
