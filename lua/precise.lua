-- Sliding window log with a precision: the admissions of one grain are one entry, which counts until the last of them is one window
-- old. x is the window, and y the grain.
--
-- A text of little-endian doubles. Of each entry, oldest first: the time of its last admission, its weight, and the time of its first
-- admission. Then: the weight of all, how many entries at the front have expired, how many there are with those, the time of the first
-- that has not expired, and until when the key holds them. A check reads the last eight numbers, and writes them.
--
-- A log is empty if its last entry has expired, or is too far ahead of the clock: that belongs to a clock that is gone. What cannot be
-- a log counts for nothing.

-- How many entries the call may still pass for the waits of denied charges, beside eight of each.
local reads = ALL_READS

local function entry_at(key, place)
  return unpack_numbers('<ddd', call('GETRANGE', key, 24 * place, 24 * place + 23))
end

-- Passes the first entries as long as they are not younger than `til` and weigh less than `need`, at most so many. Returns the place
-- and the time of the next one, and the weight of those before it.
local function pass(key, log, til, need, most)
  local place, last, passed, text, position, size = log.first, log.first + most, 0, '', 1, 2
  while true do
    if position > #text then
      text, position = call('GETRANGE', key, 24 * place, 24 * (place + size) - 1), 1
      size = 8 * size
    end
    local at, weight, _, following = unpack_numbers('<ddd', text, position)
    if place >= last or at > til or passed + weight >= need then
      return place, at, passed
    end
    place, passed, position = place + 1, passed + weight, following
  end
end

-- The last eight numbers.
local function tail_of(log)
  local newest, weight, since, total = log.newest, log.weight, log.since, log.total
  return pack('<dddddddd', newest, weight, since, total, log.first, log.count, log.oldest, log.expires)
end

-- Writes the last entry and what follows it; where `anew`, with the entries before it that count, and no others.
local function save(charge, log, anew)
  local key, til, last, entries = charge.key, log.newest + charge.x, log.count - 1, ''
  local keeps = not anew and til <= log.expires and log.expires <= til + SLACK
  log.expires = keeps and log.expires or til + SLACK - (til + SLACK) % 1000
  if anew then
    entries = log.first < last and call('GETRANGE', key, 24 * log.first, 24 * last - 1) or ''
    log.first, log.count = 0, log.count - log.first
    call('SET', key, entries .. tail_of(log), 'PXAT', expiry(til))
  else
    call('SETRANGE', key, 24 * last, tail_of(log))
    if not keeps then
      call('PEXPIREAT', key, expiry(til))
    end
  end
end

-- The state is one table, in which `stored` is how many entries have expired as it is stored.
local function precise_read(charge)
  local window, value = charge.x, call('GETRANGE', charge.key, '-64', '-1')
  local newest, weight, since, total, first, count, oldest, expires
  if #value == 64 then
    newest, weight, since, total, first, count, oldest, expires = unpack_numbers('<dddddddd', value)
  end
  if not total or not (0 < total and total < EXACT and 0 <= first and first < count) then
    newest, total, first, count, expires = -1, 0, 0, 0, 0
  end
  local log = {
    newest = newest, weight = weight, since = since, total = total, first = first, count = count, oldest = oldest, expires = expires,
    stored = first,
  }
  if count == 0 or not (now - window < newest and (newest <= now or newest <= now + math.min(SLACK, window))) then
    log.newest, log.total, log.first = -1, 0, count
  elseif oldest <= now - window then
    local passed
    log.first, log.oldest, passed = pass(charge.key, log, now - window, math.huge, MOST_EXPIRED)
    log.total = math.max(0, total - passed)
  end
  return log.total < charge.quota and charge.quota - log.total or 0, log
end

local function precise_add(charge, weight, _, log)
  -- Where the clock was set back, the last entry goes on.
  local time, anew = log.newest > now and log.newest or now, false
  if log.newest < time - time % charge.y then
    -- What has expired is removed once it is a third of the text.
    anew = 3 * log.first >= log.count
    log.count, log.weight, log.since = log.count + 1, 0, time
  end
  if weight > MAX_TOTAL - log.total then
    weight = math.max(1, MAX_TOTAL - log.total)
  end
  log.newest, log.weight, log.total = time, log.weight + weight, log.total + weight
  if log.count - log.first == 1 then
    log.oldest = time
  end
  save(charge, log, anew)
  return charge.x
end

-- The wait until enough entries have expired; where that is beyond what a call may pass, until the last one passed has.
local function precise_wait(charge, cost, log)
  local window, total, wait = charge.x, log.total, 0
  local need = cost and math.min(total + cost - charge.quota, total)
  if need and need <= 0 then
    wait = window
  elseif need then
    local most = reads < BUDGET and 7 or MOST_EXPIRED - (log.first - log.stored)
    local place, at = pass(charge.key, log, math.huge, need, most)
    reads = reads - (place + 1 - log.first)
    wait = math.max(1, math.min(at + window - now, window + SLACK))
  end
  if log.first ~= log.stored then
    log.stored = log.first
    call('SETRANGE', charge.key, 24 * (log.count - 1), tail_of(log))
  end
  return wait, total > 0 and math.min(window, log.newest + window - now) or 0
end

-- What only the driver needs.

-- Takes back from the first entry that is not older than the admission, and still counts. If the admission is older than that entry,
-- its own has expired.
local function precise_give_back(charge, at, cost, log)
  local key, last, from = charge.key, log.count - 1, math.max(at, now - charge.x + 1)
  if log.newest < from then
    return
  end
  local place, other = log.first, last
  while place < other do
    local middle = math.floor((place + other) / 2)
    if entry_at(key, middle) < from then
      place = middle + 1
    else
      other = middle
    end
  end
  local time, weight, since = entry_at(key, place)
  local part = since <= at and math.min(weight, cost) or 0
  if part > 0 then
    log.total = math.max(0, log.total - part)
    if place < last then
      call('SETRANGE', key, 24 * place, pack('<ddd', time, weight - part, since))
    else
      log.weight = weight - part
    end
    -- The last entry has weight.
    while log.weight == 0 and log.first < log.count - 1 and last - log.count < BUDGET do
      log.count = log.count - 1
      log.newest, log.weight, log.since = entry_at(key, log.count - 1)
    end
    save(charge, log, log.count <= last)
  end
end
