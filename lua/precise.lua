-- Sliding window log with a precision: the admissions of one grain are one entry, which counts until the last of them is one window
-- old. x is the window, and y the grain.
--
-- A text of little-endian doubles, of which a check reads the first nine, and writes them. Of the last entry: the time of its last
-- admission, its weight, and the time of its first admission. Then: the weight of all, the number of the first entry that has not
-- expired, the number after that of the last one, the time of the first, until when the key holds them, and the room of what follows.
-- That are the other entries: the nth, in three numbers, has the place n % room. They have a room of their own since Redis doubles a
-- text that grows by itself.
--
-- A log is empty if its last entry has expired, or is too far ahead of the clock: that belongs to a clock that is gone. What cannot be
-- a log counts for nothing.

-- How many entries the call may still pass for the waits of denied charges, beside eight of each.
local reads = ALL_READS

-- The entries from one number until before another, or until the end of the text.
local function entries_of(key, log, from, til)
  local place = from % log.room
  return call('GETRANGE', key, 72 + 24 * place, 71 + 24 * math.min(place + til - from, log.room))
end

-- An entry before the last one.
local function entry_at(key, log, number)
  return unpack_numbers('<ddd', entries_of(key, log, number, number + 1))
end

-- Passes the first entries as long as they are not younger than `til` and weigh less than `need`, at most so many, and not the last.
-- Returns the number and the time of the next one, and the weight of those before it.
local function pass(key, log, til, need, most)
  local last, number, passed, text, position, size = log.count - 1, log.first, 0, '', 1, 4
  local bound = math.min(number + most, last)
  while number < last do
    if position > #text then
      text, position = entries_of(key, log, number, math.min(number + size, bound + 1, last)), 1
      size = 8 * size
    end
    local at, weight, _, following = unpack_numbers('<ddd', text, position)
    if number >= bound or at > til or passed + weight >= need then
      return number, at, passed
    end
    number, passed, position = number + 1, passed + weight, following
  end
  return number, log.newest, passed
end

-- The first nine numbers.
local function head_of(log)
  return pack('<ddddddddd', log.newest, log.weight, log.since, log.total, log.first, log.count, log.oldest, log.expires, log.room)
end

-- Writes the first nine numbers, and the entry that has ended with this change.
local function save(charge, log, ended)
  local key, til, others = charge.key, log.newest + charge.x, log.count - 1 - log.first
  local keeps = til <= log.expires and log.expires <= til + SLACK and (now % CHANCE > 0 or call('PTTL', key) ~= -1)
  log.expires = keeps and log.expires or til + SLACK - (til + SLACK) % 1000
  if others > log.room then
    local entries = ended or ''
    if others > 1 then
      local from, til = log.first, log.count - 2
      local before = entries_of(key, log, from, til)
      local got = #before / 24
      entries = before .. (got < til - from and entries_of(key, log, from + got, til) or '') .. entries
    end
    -- Half as many again, up to what a window can have.
    log.room = math.max(others, math.min(others + math.ceil(others / 2), math.ceil(charge.x / charge.y)))
    log.first, log.count = 0, others + 1
    call('SET', key, head_of(log) .. entries .. string.rep('\0', 24 * (log.room - others)), 'PXAT', expiry(til))
    return
  end
  if not keeps then
    -- Before what says so, in case it is refused; and after a write of nothing, which is refused without memory.
    call('SETRANGE', key, '0', '')
    call('PEXPIREAT', key, expiry(math.max(now, til)))
  end
  if ended then
    call('SETRANGE', key, 72 + 24 * ((log.count - 2) % log.room), ended)
  end
  call('SETRANGE', key, '0', head_of(log))
end

-- The state is one table, in which `stored` is the number of the first entry as it is stored.
local function precise_read(charge)
  local window, value = charge.x, call('GETRANGE', charge.key, '0', '71')
  local newest, weight, since, total, first, count, oldest, expires, room
  if #value == 72 then
    newest, weight, since, total, first, count, oldest, expires, room = unpack_numbers('<ddddddddd', value)
  end
  if not total or not (0 < total and total < EXACT and 0 <= first and first < count and count - first <= room + 1 and room < EXACT) then
    newest, total, first, count, expires, room = -1, 0, 0, 0, 0, -1
  end
  local log = {
    newest = newest, weight = weight, since = since, total = total, first = first, count = count, oldest = oldest, expires = expires,
    room = room, stored = first,
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
  local time, ended = log.newest > now and log.newest or now, nil
  if log.newest < time - time % charge.y then
    ended = log.first < log.count and pack('<ddd', log.newest, log.weight, log.since) or nil
    log.count, log.weight, log.since = log.count + 1, 0, time
  end
  if weight > MAX_TOTAL - log.total then
    weight = math.max(1, MAX_TOTAL - log.total)
  end
  log.newest, log.weight, log.total = time, log.weight + weight, log.total + weight
  if log.count - log.first == 1 then
    log.oldest = time
  end
  save(charge, log, ended)
  return charge.x
end

-- The wait until enough entries have expired; where that is beyond what a call may pass, until the last one passed has.
local function precise_wait(charge, cost, log)
  local window, total, wait = charge.x, log.total, 0
  local need = cost and math.min(total + cost - charge.quota, total)
  if need and need <= 0 then
    -- More has expired since the requests were judged, if anything counts.
    wait = total > 0 and 1 or window
  elseif need then
    local most = reads < BUDGET and 7 or MOST_EXPIRED - (log.first - log.stored)
    local number, at = pass(charge.key, log, math.huge, need, most)
    reads = reads - (number + 1 - log.first)
    wait = math.max(1, math.min(at + window - now, window + SLACK))
  end
  if log.first ~= log.stored then
    log.stored = log.first
    call('SETRANGE', charge.key, '0', head_of(log))
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
  local number, other = log.first, last
  while number < other do
    local middle = math.floor((number + other) / 2)
    if entry_at(key, log, middle) < from then
      number = middle + 1
    else
      other = middle
    end
  end
  local time, weight, since = log.newest, log.weight, log.since
  if number < last then
    time, weight, since = entry_at(key, log, number)
  end
  local part = since <= at and math.min(weight, cost) or 0
  if part > 0 then
    log.total = math.max(0, log.total - part)
    if number < last then
      call('SETRANGE', key, 72 + 24 * (number % log.room), pack('<ddd', time, weight - part, since))
    else
      log.weight = weight - part
    end
    -- The last entry has weight.
    while log.weight == 0 and log.first < log.count - 1 and last - log.count < BUDGET do
      log.count = log.count - 1
      log.newest, log.weight, log.since = entry_at(key, log, log.count - 1)
    end
    save(charge, log)
  end
end
