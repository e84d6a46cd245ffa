-- Decides a batch of requests at one instant of the server's own clock.
--
-- KEYS  the keys of the charges, request after request
-- ARGV  runs of requests that look alike. Words end with a zero byte, numbers are little-endian doubles:
--       run     operation, how many requests, how many charges each has, how many callers send each of them (0: a number
--               for each request follows the charges), for a refund when it was admitted, and the charges
--       charge  algorithm, role, cost, quota, three parameters of the algorithm, and for a calendar four boundaries
--       Where there are calendars, the first argument is `within` and the time that the boundaries of all of them enclose.
-- reply little-endian doubles in one string: the time in microseconds, then for each charge of each request: how many of
--       its callers are admitted, remaining, the wait of the next caller (0: this charge fits), the time to a full reset;
--       the time alone where it is not within the boundaries, and then nothing was done.
--       Where requests failed, which have added nothing, a list: that string, with -n in place of the callers of the
--       nth of them, and the texts of their errors (`WRONGTYPE Operation ...`)
--
-- Times are microseconds and, like all numbers here, integers below 2^53. Names in capitals are constants, which the store
-- replaces by their values. A call of one check spends more on what is made here than on the check: a function or a number
-- as text costs as much as half a command. So a function is made when a charge needs it, once.

local replicate_commands = redis.replicate_commands
if replicate_commands then
  replicate_commands()
end

local call, pack, unpack_numbers = redis.call, struct.pack, struct.unpack

local time = call('TIME')
local now_text = time[1] .. time[2]
if #time[2] < 6 then
  now_text = time[1] .. string.rep('0', 6 - #time[2]) .. time[2]
end
local now = time[1] * 1000000 + time[2]

-- PEXPIREAT's argument for a key that matters until then. In two halves, which fit where a C long has 32 bits.
local function expiry(at)
  at = at + 1000000
  return string.format('%d%03d', at / 1000000, at % 1000000 / 1000)
end

-- The packed numbers, and how many keys belong to requests that were decided.
local reply, passed = nil, 0
-- The texts of errors, if there are any.
local errors
-- The trial: runs each command of these scripts once, on a key that is gone afterwards, and replies with the first command
-- that Redis does not run, and its error. `TIME` ran before.

if ARGV[1] == 'trial' then
  local key, expires = KEYS[1], expiry(now)
  for _, command in ipairs({
    { 'UNLINK', key },
    { 'SET', key, '0', 'PXAT', expires },
    { 'SETRANGE', key, '0', '1' },
    { 'GET', key },
    { 'PTTL', key },
    { 'UNLINK', key },
    { 'ZADD', key, '1', 'member' },
    { 'PEXPIREAT', key, expires },
    { 'ZINCRBY', key, '1', 'member' },
    { 'ZCARD', key },
    { 'ZCOUNT', key, '-inf', '+inf' },
    { 'ZSCORE', key, 'member' },
    { 'ZRANGE', key, '0', '0' },
    { 'ZRANGEBYSCORE', key, '0', '1', 'LIMIT', '0', '1' },
    { 'ZREVRANGEBYSCORE', key, '1', '0', 'LIMIT', '0', '1' },
    { 'ZREMRANGEBYRANK', key, '1', '1' },
    { 'ZREMRANGEBYSCORE', key, '0', '1' },
    { 'ZREM', key, 'member' },
  }) do
    local answer = redis.pcall(unpack(command))
    if type(answer) == 'table' and answer.err then
      redis.pcall('UNLINK', key)
      return { pack('<d', now), command[1], string.match(answer.err, '%u%u+ [^\r\n]*') or 'ERR ' .. answer.err }
    end
  end
  return pack('<d', now)
end

-- The runs: reads a run and its charges. The files of the algorithms stand within these loops, which end in the driver.

-- The rules, one for each algorithm: (key, callers, rest, cost, quota, three parameters) -> how many callers are counted, what
-- remains, the wait, the time to a full reset. A rule reads its key, finds how many of the callers fit, and adds their weight.
local log, counter, fixed, bucket, concurrency
-- What the rules of keys of numbers share.
local fetch, write, keep
-- Called by the rule of a charge that does not decide alone, when it has read its key: (room, how many callers fit, cost, quota)
-- -> how many callers are counted, whether the next one has to wait, for a refund when it was admitted. It decides the charges
-- after that one, so all keys of a request are read before anything is added to one. By role: none, `checked`, `once`.
local rest, checked, marker

-- Of the request: how many callers send it, for a refund when it was admitted, how many callers fit the charges so far, the
-- charges that follow, linked, and the position of the last key that was read.
local operation, times, admitted_at, fits, following, at

for run = 1, #ARGV do
  local requests, size, position
  operation, requests, size, times, position = unpack_numbers('<sddd', ARGV[run])
  admitted_at = nil
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
-- Keys of three numbers, and until when the key holds them. They are little-endian doubles: to read and write them as text
-- costs more than the decision.
if algorithm ~= 'log' and algorithm ~= 'concurrency' and not fetch then
  -- What a key holds, or zeros where it holds anything else.
  function fetch(key)
    local value = call('GET', key)
    if value and #value == 32 then
      local a, b, c, expires = unpack_numbers('<dddd', value)
      if a >= 0 and a < 9007199254740992 and b >= 0 and b < 9007199254740992 and c >= 0 and c < 9007199254740992 then
        return a, b, c, expires
      end
    end
    return 0, 0, 0, 0
  end

  -- Writes to a key that matters `til` then. An expiry that will do is left alone: to set one costs as much as all else.
  function write(key, a, b, c, expires, til)
    if til <= expires and expires <= til + 1000000 then
      call('SETRANGE', key, '0', pack('<dddd', a, b, c, expires))
    else
      expires = til + 1000000 - (til + 1000000) % 1000
      call('SET', key, pack('<dddd', a, b, c, expires), 'PXAT', expiry(til))
    end
  end

  -- Gives a key that has no expiry one.
  function keep(key, til)
    if call('PTTL', key) == -1 then
      call('PEXPIREAT', key, expiry(til))
    end
  end
end
-- Sliding window log: a sorted set with one member for each admission, scored with its time. A charge fits while the
-- weights admitted within the last window leave room for it.
--
-- The name of a member is `time[~][:weight][-attempt]`. Members weigh 1 until a heavier one is added. As long as there are
-- heavier ones, a member `#`, kept at rank 0, has minus the total weight as its score. A weight is written with a letter for
-- its number of digits (`:a5`, `:b10`), so that members of one time are in the order of their weights.
--
-- Where a grain is given, admissions of one grain of time are one member, scored with the last of them. Without a grain,
-- charges beyond the limit are merged in the same way, in steps of a fraction of the window, and `~` marks their members.

if algorithm == 'log' and not log then
  -- As text, of which Lua's own conversion keeps 14 digits: when keys expire, and up to which time members have expired.
  local expires_at, expires_text, expired_at, expired_text

  -- The time and the weight of a member. Names are read instead of scores, which Redis would have to print.
  local function parts_of(member)
    local plain_at = tonumber(member)
    if plain_at then
      return plain_at, 1
    end
    local member_at, weight = string.match(member, '^(%d+)~?:?%a?(%d*)')
    return tonumber(member_at), tonumber(weight) or 1
  end

  -- Drops `count` members from this rank on, and returns how many are stored, what they weigh, and whether weights are counted.
  -- If all that are stored weigh 1, members are counted instead, apart from those that count no more but could not be dropped.
  -- The last `#` stays: a key that is deleted cannot be created again on a node from which its slot is moving.
  local function drop(key, from, count, stored, total, weighted, grain, uncounted)
    if count > 0 then
      local upto = from + count - 1
      if weighted then
        local dropped = 0
        for _, member in ipairs(call('ZRANGE', key, from, upto)) do
          local _, weight = parts_of(member)
          dropped = dropped + weight
        end
        call('ZINCRBY', key, dropped, '#')
        total = total - dropped
      end
      call('ZREMRANGEBYRANK', key, from, upto)
      stored = stored - count
    end

    if weighted and stored == 0 then
      total = 0
    elseif weighted and stored == total and grain == 0 then
      call('ZREM', key, '#')
      weighted = false
    end
    return stored, weighted and total or stored - uncounted, weighted
  end

  function log(key, times, rest, cost, quota, window, grain, grain_now)
    local expired, budget = now - window, 997
    -- Of the members, `#` not among them: how many there are, what they weigh, how many have expired, and how many belong
    -- to a clock that is gone.
    local stored = call('ZCARD', key)
    local total, late, gone = stored, 0, 0
    -- Whether `#` has the total, whether the member of this check is added already, whether all members have expired and are
    -- still there; the times of the oldest and of the newest member, while they are known.
    local weighted, held, stale, first, newest

    if stored > 0 then
      local members = call('ZRANGE', key, '0', grain > 0 and '1' or '0')
      local oldest = members[1]
      if oldest == '#' then
        weighted, stored, oldest = true, stored - 1, members[2]
        total = -tonumber(call('ZSCORE', key, '#'))
        if not (total >= 0 and total < 9007199254740992) then
          total = total > 0 and 9007199254740992 - 1 or 0
        end
      end
      first = oldest and (tonumber(oldest) or parts_of(oldest))
    end

    -- Drops what has expired, oldest first, within the budget.
    if weighted and not first or first and first <= expired then
      first = nil
      if expired_at ~= expired then
        expired_at, expired_text = expired, string.format('%d%06d', math.max(0, expired) / 1000000, math.max(0, expired) % 1000000)
      end
      if weighted or stored > budget - 2 then
        late = call('ZCOUNT', key, '(0', expired_text)
        local count = math.min(late, budget - 2)
        late, budget = late - count, budget - count
        stored, total, weighted = drop(key, weighted and 1 or 0, count, stored, total, weighted, grain, late)
      else
        -- A key that loses its last member cannot be created again on a node from which its slot is moving. So a check that
        -- decides alone adds its member first; else, if all have expired, they are dropped last.
        held = not rest and cost == 1 and times == 1 and grain == 0 and call('ZADD', key, now_text, now_text) > 0
        newest = not held and (parts_of(call('ZRANGE', key, '-1', '-1')[1]))
        if newest and newest <= expired then
          stale, stored, newest = true, 0, nil
        else
          local dropped = call('ZREMRANGEBYSCORE', key, '(0', expired_text)
          stored, budget = stored - dropped, budget - dropped
        end
        total = stored
      end
    end

    local room, counted = quota - total, times
    if room < times * cost then
      if held then
        held = call('ZREM', key, now_text) == 0
      end
      -- Drops what a clock that is gone has left, newest first: it lies too far ahead.
      if times > 0 and stored > 0 then
        newest = newest or parts_of(call('ZRANGE', key, '-1', '-1')[1])
        local ahead = newest > now and now + math.min(1000000, window)
        if ahead and newest > ahead then
          newest = nil
          gone = call('ZCOUNT', key, '(' .. string.format('%.0f', ahead), '+inf')
          local count = math.min(gone, budget - 2)
          gone, budget = gone - count, budget - count
          stored, total, weighted = drop(key, -count, count, stored, total, weighted, grain, late + gone)
          room = quota - total
        end
      end
      room = room > 0 and room or 0
      if room < times * cost then
        counted = (room - room % cost) / cost
      end
    end

    local waits = counted < times
    -- A member to add whose weight is written down: its time, its weight, and whether it is of charges beyond the limit.
    local member_at, weight, beyond
    -- Whether there is `#`.
    local marked

    if rest then
      local refunded_at
      counted, waits, refunded_at = rest(room, counted, cost, quota)

      -- Takes weight back from what was added at that time, as far as it still counts.
      if refunded_at then
        local left, step = cost, grain > 0 and grain or math.ceil(window / 64)
        marked = weighted
        local function take_back(members, of_beyond)
          for _, member in ipairs(members) do
            local is_beyond = string.find(member, '~', 1, true)
            if left > 0 and (is_beyond or not of_beyond) then
              local taken_at, held = parts_of(member)
              local taken = math.min(left, held)
              left, total, stored = left - taken, total - taken, stored - 1
              call('ZREM', key, member)
              if held > taken then
                member_at, weight, beyond = taken_at, held - taken, is_beyond
              elseif weighted then
                call('ZINCRBY', key, taken, '#')
              end
            end
          end
        end

        local from, upto = refunded_at, refunded_at
        local step_upto = refunded_at - refunded_at % step + step - 1
        if grain > 0 then
          from, upto = refunded_at - refunded_at % step, step_upto
        end
        local members = call('ZRANGEBYSCORE', key, math.max(from, expired + 1), upto, 'LIMIT', '0', budget - 1)
        take_back(members, false)
        -- A charge beyond the limit may have been merged with later ones.
        local reads = budget - 1 - #members
        if grain == 0 and left > 0 and stored > 0 and reads > 0 then
          from = math.max(refunded_at, expired) + 1
          take_back(call('ZREVRANGEBYSCORE', key, step_upto, from, 'LIMIT', '0', reads), true)
        end
        newest, room = nil, math.max(0, quota - total)
      end
    end

    if counted > 0 then
      -- Beyond the limit, which only charges go, one member holds those of one step: a flood of them adds few members.
      beyond = room == 0 and stored > 0 and grain == 0
      if cost == 1 and counted <= 32 and grain == 0 and not weighted and not beyond then
        -- Callers of the same check are a member each while they are few. A member of that name has that score, so adding
        -- it again changes nothing. Each attempt has another name, and there are no more than `stored` to meet.
        local missing = counted
        if held then
          missing = 0
        elseif counted == 1 then
          missing = 1 - call('ZADD', key, now_text, now_text)
        else
          local members = { now_text, now_text }
          for i = 2, counted do
            members[2 * i - 1], members[2 * i] = now_text, now_text .. '-' .. i
          end
          missing = counted - call('ZADD', key, unpack(members))
        end
        local attempt = missing > 0 and math.max(stored, 32)
        while missing > 0 do
          attempt = attempt + 1
          missing = missing - call('ZADD', key, now_text, now_text .. '-' .. attempt)
        end
        total = total + counted
      else
        marked = weighted
        if not weighted then
          weighted, total = true, stored
        end
        member_at, weight = now, counted * cost
        if total + weight > 4503599627370496 then
          weight = math.max(1, 4503599627370496 - total)
        end
        total = total + weight
        if grain > 0 or beyond then
          local step = math.ceil(window / 64)
          local from = grain > 0 and grain_now.from or now - now % step
          local upto = grain > 0 and grain_now.upto or from + step - 1
          local limit = beyond and '1' or budget == 997 and '999' or budget - 1
          for _, member in ipairs(call('ZREVRANGEBYSCORE', key, upto, from, 'LIMIT', '0', limit)) do
            if not beyond or string.find(member, '~', 1, true) then
              local merged_at, merged = parts_of(member)
              member_at, weight = math.max(member_at, merged_at), weight + merged
              call('ZREM', key, member)
              stored = stored - 1
            end
          end
        end
      end
    end

    if weight then
      local score = member_at == now and now_text or string.format('%.0f', member_at)
      local name = beyond and score .. '~' or score
      if weight > 1 then
        local digits = string.format('%.0f', weight)
        name = name .. ':' .. string.char(96 + #digits) .. digits
      end
      local member, attempt = name, stored
      while call('ZADD', key, score, member, -total, '#') == (marked and 0 or 1) do
        marked, attempt = true, attempt + 1
        member = name .. '-' .. attempt
      end
      stored = stored + 1
    end
    if stale then
      call('ZREMRANGEBYSCORE', key, '(0', expired_text)
    end
    if counted > 0 then
      if expires_at ~= now + window then
        expires_at, expires_text = now + window, expiry(now + window)
      end
      call('PEXPIREAT', key, expires_text)
      room = room - counted * cost
      if room < 0 then
        room = 0
      end
      if not waits then
        return counted, room, 0, window
      end
      first = first and math.min(first, now)
    end

    local wait = 0
    if waits then
      wait = window
      local need = math.min(total + cost - quota, total)
      if need > 0 then
        if call('PTTL', key) == -1 then
          call('PEXPIREAT', key, expiry(now + window))
        end
        -- The time of the member that frees so much weight, or, past the budget, of the last one looked at.
        local freed_at = now
        if not weighted then
          local rank = late + need - 1
          freed_at = rank == 0 and first or parts_of(call('ZRANGE', key, rank, rank)[1])
        else
          -- Most waits are for one of the first.
          local from, size = 1, 8
          while need > 0 and from < budget and from <= stored do
            local upto = math.min(from + size, budget) - 1
            for _, member in ipairs(call('ZRANGE', key, from, upto)) do
              if need > 0 then
                local member_at, weight = parts_of(member)
                freed_at, need = member_at, need - weight
              end
            end
            from, size = upto + 1, size * 8
          end
        end
        wait = math.max(1, freed_at + window - now)
      end
    end

    -- The time until the newest member leaves.
    local reset = 0
    if counted > 0 then
      reset = window
    elseif stored > late + gone then
      newest = newest or parts_of(call('ZRANGE', key, -1 - gone, -1 - gone)[1])
      reset = math.min(window, newest + window - now)
    end
    return counted, room, wait, reset
  end
end

if algorithm == 'log' then
  rule = log
  if y > 0 then
    local from = now - now % y
    local upto = from + y - 1
    z = {
      from = string.format('%d%06d', from / 1000000, from % 1000000),
      upto = string.format('%d%06d', upto / 1000000, upto % 1000000),
    }
  end
end
-- Sliding window counter: when the current window began, what it has counted, and what the previous one had. The
-- previous window counts in proportion to how much of it the last window covers, in whole ticks, rounded up.

if algorithm == 'counter' and not counter then
  function counter(key, times, rest, cost, quota, window, tick, cap)
    local start, current, previous, expires = fetch(key)
    local opens = now - now % window
    if start > now then
      -- In the next window: the clock was set back over the boundary. Further ahead, the clock is gone.
      if start > now + math.min(1000000, window) then
        start, current, previous = opens, 0, 0
      end
    elseif start < opens then
      start, current, previous = opens, 0, start + window >= opens and current or 0
    else
      start = opens
    end

    -- What was counted under another limit may be above `cap`: the product with it would not be exact.
    local room, counted = quota - current, times
    if previous > 0 then
      local ticks = (window + -window % tick) / tick
      local left = ticks
      if start < now then
        left = ticks - (now - start - (now - start) % tick) / tick
      end
      if left > 0 then
        local share = (previous < cap and previous or cap) * left
        room = room - (share + -share % ticks) / ticks
      end
    end
    if room < times * cost then
      room = room < 0 and 0 or room
      counted = (room - room % cost) / cost
    end
    local waits = counted < times
    if rest then
      local refunded_at
      counted, waits, refunded_at = rest(room, counted, cost, quota)
      if refunded_at and current + previous > 0 then
        if refunded_at >= start then
          current = math.max(0, current - cost)
        elseif refunded_at + window >= start then
          previous = math.max(0, previous - cost)
        end
        write(key, start, current, previous, expires, start + 2 * window)
        return counter(key, 0, nil, cost, quota, window, tick, cap)
      end
    end

    if counted > 0 then
      local weight = counted * cost
      if current + weight <= cap then
        current = current + weight
      elseif current < cap then
        current = cap
      end
      write(key, start, current, previous, expires, start + 2 * window)
      room = room - weight
      if room < 0 then
        room = 0
      end
    end

    local wait = 0
    if waits then
      if counted == 0 then
        keep(key, start + 2 * window)
      end
      local left, counts = quota - current - cost, previous
      local opened = start
      if left < 0 then
        -- Not in this window: in the next one what counts now will be the previous.
        left, counts, opened = math.max(0, quota - cost), current, start + window
      end
      -- How long after the start of a window the share of the previous one has shrunk to what is left.
      local ticks = (window + -window % tick) / tick
      local gone = math.max(0, ticks - math.floor(left * ticks / math.max(1, math.min(counts, cap))))
      wait = math.max(1, opened + math.min(gone * tick, window) - now)
    end
    if current > 0 then
      return counted, room, wait, start + 2 * window - now
    end
    return counted, room, wait, previous > 0 and start + window - now or 0
  end
end
if algorithm == 'counter' then
  rule = counter
end
-- Fixed window: when the open window began, and what was used of it.
--
-- Anchored windows begin with the first request, aligned ones at multiples of their length, and those of a calendar at
-- boundaries that come with the call, some around the time that the caller guessed.

if algorithm == 'fixed' and not fixed then
  function fixed(key, times, rest, cost, quota, opens, closes, anchored)
    local start, used, _, expires = fetch(key)
    -- The end of a window that is open; in the next window if the clock was set back over the boundary.
    local finish = (anchored or start > now) and start + closes - opens or closes
    if
      used == 0
      or anchored and finish <= now
      or not anchored and start < opens
      or start > now and start > now + math.min(1000000, closes - opens)
    then
      start, finish, used = opens, closes, 0
    end

    local room, counted = quota - used, times
    if room < times * cost then
      room = room < 0 and 0 or room
      counted = (room - room % cost) / cost
    end
    local waits = counted < times
    if rest then
      local refunded_at
      counted, waits, refunded_at = rest(room, counted, cost, quota)
      if refunded_at and used > 0 and start <= refunded_at and refunded_at < finish then
        used = math.max(0, used - cost)
        write(key, start, used, 0, expires, finish)
        room = math.max(0, quota - used)
      end
    end

    if counted > 0 then
      local weight = counted * cost
      used = used + weight
      if used > 4503599627370496 then
        used = 4503599627370496
      end
      write(key, start, used, 0, expires, finish)
      room = room - weight
      if room < 0 then
        room = 0
      end
    end

    local wait = 0
    if waits then
      if counted == 0 then
        keep(key, finish)
      end
      wait = math.max(1, finish - now)
    end
    return counted, room, wait, used > 0 and finish - now or 0
  end
end
if algorithm == 'fixed' then
  rule = fixed
  local length, anchored = x, y == 1
  if anchored then
    x, y = now, now + length
  elseif length > 0 then
    x = now - now % length
    y = x + length
  else
    local boundaries = { unpack_numbers('<dddd', ARGV[run], position) }
    position = boundaries[5]
    for i = 2, 4 do
      if boundaries[i - 1] <= now and now < boundaries[i] then
        x, y = boundaries[i - 1], boundaries[i]
      end
    end
  end
  z = anchored
end
-- Token bucket, as the generic cell rate algorithm computes it: since when the bucket is not full, how many tokens were
-- taken since then, and when the last was. `rate` tokens come in `period` microseconds, in lowest terms.

if algorithm == 'bucket' and not bucket then
  -- How long it takes until this many tokens have come, rounded up. Split so that no product leaves 2^53.
  local function time(tokens, rate, period)
    local over = tokens * (period % rate)
    return tokens * ((period - period % rate) / rate) + (over + -over % rate) / rate
  end

  -- How many tokens come in this time.
  local function come(span, rate, period)
    local left = span % period
    local periods = (span - left) / period
    if rate == 1 then
      return periods
    end

    local count = math.floor(left / period * rate)
    while time(count + 1, rate, period) <= left do
      count = count + 1
    end
    while count > 0 and time(count, rate, period) > left do
      count = count - 1
    end
    return periods * rate + count
  end

  function bucket(key, times, rest, cost, quota, rate, period, cap)
    local since, spent, at, expires = fetch(key)
    if spent > cap then
      spent = cap
    end
    -- Forgets what has come back, and what was taken too far ahead of the clock: that belongs to a clock that is gone.
    local full = since + (rate == 1 and spent * period or time(spent, rate, period))
    if full <= now or spent == 0 or at > now and at > now + math.min(1000000, time(quota, rate, period)) then
      since, spent, at, full = now, 0, now, now
    end

    local room, counted = quota - spent, times
    if since < now then
      local span = now - since
      room = room + (rate == 1 and (span - span % period) / period or come(span, rate, period))
    end
    if room < times * cost then
      room = room < 0 and 0 or room
      counted = (room - room % cost) / cost
    end
    local waits = counted < times
    if rest then
      local refunded_at
      counted, waits, refunded_at = rest(room, counted, cost, quota)
      -- Gives tokens back that have not come back already. If nothing was taken after them, these are all that are missing.
      -- Else, those that came since then may all have been theirs: they are given back no second time, nor is the time in
      -- which the next comes.
      if refunded_at and spent > 0 and refunded_at >= since then
        local count, left = 0, 0
        if refunded_at < at then
          local span = math.max(0, now - refunded_at)
          count = come(span, rate, period)
          -- Rounded up, where the last token came within a microsecond.
          local single = count % rate
          local fraction = single * (period % rate) % rate > 0 and 1 or 0
          left = span - (count - single) / rate * period - time(single, rate, period) + fraction
        end
        if cost > count then
          spent, since = math.max(0, spent - (cost - count)), since + left
          full = since + time(spent, rate, period)
          if full <= now or spent == 0 then
            since, spent, at, full = now, 0, now, now
          end
          write(key, since, spent, at, expires, full)
          return bucket(key, 0, nil, cost, quota, rate, period, cap)
        end
      end
    end

    if counted > 0 then
      local weight = counted * cost
      spent = spent + weight
      if spent > cap then
        -- Whole periods are settled before the numbers grow too large.
        local periods = math.floor(math.max(0, now - since) / period)
        since = since + periods * period
        spent = math.min(math.max(0, spent - weight - periods * rate) + weight, cap)
      end
      if at < now then
        at = now
      end
      full = since + (rate == 1 and spent * period or time(spent, rate, period))
      write(key, since, spent, at, expires, full)
      room = room - weight
      if room < 0 then
        room = 0
      end
      if not waits then
        return counted, room, 0, full - now
      end
    end

    local wait = 0
    if waits then
      if counted == 0 then
        keep(key, full)
      end
      local missing = math.min(spent, math.max(0, spent + cost - quota))
      wait = math.max(1, since + time(missing, rate, period) - now)
    end
    return counted, room, wait, full > now and full - now or 0
  end
end
if algorithm == 'bucket' then
  rule = bucket
end
-- Slots: a sorted set with one member for each lease, scored with its expiry. A charge fits while the weights of the leases that
-- have not expired leave room for it. The id of a lease, which the client chooses, comes in place of two parameters.
--
-- The name of a member is four doubles: the two parts of the id, the length of the lease and its weight. As long as there are
-- heavier ones than 1, a member `#`, kept at rank 0, has minus what they weigh beyond 1 each as its score.

if algorithm == 'concurrency' then
  if not concurrency then
    -- Lists members to drop, and returns what they weigh, and what of that is beyond 1 each.
    local function list(members, dropped, weighted)
      local beyond = 0
      for _, member in ipairs(members) do
        dropped[#dropped + 1] = member
        if weighted then
          local _, _, _, weight = unpack_numbers('<dddd', member)
          beyond = beyond + weight - 1
        end
      end
      return #members + beyond, beyond
    end

    local function drop(key, dropped)
      if #dropped > 0 then
        call('ZREM', key, unpack(dropped))
      end
    end

    local function mark(key, extra)
      if extra > 0 then
        call('ZADD', key, -extra, '#')
      else
        call('ZREM', key, '#')
      end
    end

    function concurrency(key, times, rest, cost, quota, length, high, low)
      if cost > 1000000000 then
        cost = 1000000000
      end
      -- What all leases weigh, what of that is beyond 1 each, what `#` says of that, and when the last one expires.
      local total, extra, marked, newest = call('ZCARD', key), 0, 0, now
      -- The members that have expired or belong to a clock that is gone.
      local dropped = {}
      if total > 0 then
        local first, first_at, second, second_at = unpack(call('ZRANGE', key, '0', '1', 'WITHSCORES'))
        if first == '#' then
          extra, first, first_at = -first_at, second, second_at
          marked, total = extra, total - 1 + extra
        end
        if first and tonumber(first_at) <= now then
          local members = call('ZRANGEBYSCORE', key, '(0', now_text, 'LIMIT', '0', '1000')
          local weight, beyond = list(members, dropped, marked > 0)
          total, extra = total - weight, extra - beyond
        end

        -- The times of others ahead of the clock by less than their lengths are left: their next renewals are by this clock.
        local last, last_at = unpack(call('ZRANGE', key, '-1', '-1', 'WITHSCORES'))
        newest = tonumber(last_at)
        if total + times * cost > quota and newest > now then
          local _, _, lease = unpack_numbers('<ddd', last)
          if newest > now + 2 * lease then
            local members = call('ZREVRANGEBYSCORE', key, '+inf', '(' .. now_text, 'WITHSCORES', 'LIMIT', '0', '1000')
            local gone = {}
            newest = now
            for i = 1, #members, 2 do
              local at = tonumber(members[i + 1])
              _, _, lease = unpack_numbers('<ddd', members[i])
              if at <= now + 2 * lease then
                newest = at
                break
              end
              gone[#gone + 1] = members[i]
            end
            local weight, beyond = list(gone, dropped, marked > 0)
            total, extra = total - weight, extra - beyond
          end
        end
      end

      local name = pack('<dddd', high, low, length, cost)
      local held = false
      if operation == 'renew' or operation == 'end' or operation == 'refund' then
        drop(key, dropped)
        if extra ~= marked then
          mark(key, extra)
          marked = extra
        end
        dropped, held = {}, call('ZSCORE', key, name)
      end

      local room = quota - total
      if room < 0 then
        room = 0
      end
      local fits = room >= times * cost
      local counted, waits, ends = fits and times or 0, not fits, false
      if rest then
        local refunded_at
        counted, waits, refunded_at = rest(held and math.max(room, cost) or room, held and times or counted, cost, quota)
        ends = held and (refunded_at or operation == 'end')
      end

      if counted > 0 or operation == 'renew' and (held or fits) then
        if not held then
          total, extra = total + cost, extra + cost - 1
        end
        newest = math.max(newest, now + length)
        if extra > 0 and extra ~= marked then
          call('ZADD', key, now + length, name, -extra, '#')
          marked = extra
        else
          call('ZADD', key, now + length, name)
        end
        -- The one that was the last, where the clock was set back.
        if held and tonumber(held) > now + length then
          newest = tonumber(call('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2])
        end
        call('PEXPIREAT', key, expiry(newest))
      elseif ends then
        call('ZREM', key, name)
        total, extra = total - cost, extra - cost + 1
        newest = total > 0 and tonumber(call('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2]) or now
      elseif waits and call('PTTL', key) == -1 then
        call('PEXPIREAT', key, expiry(newest))
      end
      -- A key that loses its last member cannot be created again on a node from which its slot is moving, so this is last.
      drop(key, dropped)
      if extra ~= marked then
        mark(key, extra)
      end

      room = quota - total
      if room < 0 then
        room = 0
      end
      return counted, room, waits and 1000000 or 0, newest > now and newest - now or 0
    end
  end
  rule = concurrency
end
-- Charges that do not decide alone: those of a request with several, of one with a role, and of operations other than checks.
-- A request is admitted when all of its charges fit, and only then is anything added.

if (size > 1 or operation ~= 'check' or role ~= '') and not rest then
  function rest(room, fitting, cost)
    if fitting < fits then
      fits = fitting
    end

    local charge = following
    if charge then
      local n = at + 1
      following, at = charge[9], n
      local _, remaining, wait, reset =
        charge[1](KEYS[n], charge[8] or times, charge[7], charge[2], charge[3], charge[4], charge[5], charge[6])
      reply[n + 1] = pack('<dddd', fits, remaining, wait, reset)
    elseif operation ~= 'check' and operation ~= 'renew' and (operation ~= 'peek' or fits > 0) then
      fits = times
    end

    local counted = (operation == 'check' or operation == 'charge') and fits or 0
    return counted, fits < times and room - counted * cost < cost, admitted_at
  end
end

if role ~= '' and not marker then
  -- For a charge that is only checked.
  function checked(room, fitting, cost)
    rest(room, fitting > 0 and times or 0, cost)
    return 0, fits < times and room < cost
  end

  -- For a charge that a marker exempts: it neither counts nor denies.
  local function exempt(room, _, cost)
    rest(room, times, cost)
    return 0, false
  end

  -- For a charge to count once, which is a marker. It does not deny, and it counts with the next charge. If it has counted
  -- before and has room, that one is exempt.
  function marker(room, _, cost, quota)
    local full, marked = room < cost, following
    if operation == 'refund' or operation == 'end' then
      return rest(room, times, cost)
    end
    local counts = not full and marked and marked[7] == rest
    if not full and marked and marked[7] ~= marker and room < quota then
      following = { unpack(marked) }
      following[7] = exempt
    end
    local counted = rest(room, times, cost)
    return counts and counted or 0, full
  end
end

if operation == 'reset' then
  -- Nothing reads the key afterwards: where its slot is moving to another node, that would be an error.
  function rule(key, _, rest, cost, quota)
    rest(quota, times, cost, quota)
    call('UNLINK', key)
    return 0, quota, 0, 0
  end
end

if size > 1 or operation ~= 'check' or role ~= '' then
  local finds = role == 'checked' and checked or role == 'once' and marker or rest
  -- A charge that is only checked needs room once, not for each caller, and a refund and the end of a lease need none.
  local needs = (operation == 'refund' or operation == 'end') and 0 or role == 'checked' and 1
  local charge = { rule, cost, quota, x, y, z, finds, needs, false }
  if last then
    last[9] = charge
  end
  all, last = all or charge, charge
end
  end

  -- Decides the run, request by request. A request that fails has added nothing, and those after it are decided as if it had
  -- not been there.

  -- Most calls are one check of one charge.
  if requests == 1 and #ARGV == 1 and not all then
    local fine, admitted, remaining, wait, reset = pcall(rule, KEYS[1], times, nil, cost, quota, x, y, z)
    if fine then
      return pack('<ddddd', now, admitted, remaining, wait, reset)
    end
  end

  reply = reply or { pack('<d', now), false, false }
  local listed, finish = times == 0, passed + requests * size
  -- Checks of one charge are decided without a call of `pcall` for each.
  local checks = not all and function()
    local keys = KEYS
    for n = passed + 1, finish do
      if listed then
        times, position = unpack_numbers('<d', ARGV[run], position)
      end
      reply[n + 1] = pack('<dddd', rule(keys[n], times, nil, cost, quota, x, y, z))
      passed = n
    end
  end

  while passed < finish do
    local fine, failure
    if checks then
      fine, failure = pcall(checks)
    else
      if listed then
        times, position = unpack_numbers('<d', ARGV[run], position)
      end
      -- As after a charge that all callers fit.
      fits, following, at = times, all, passed
      fine, failure = pcall(rest, 0, times, 0)
      if fine then
        passed = passed + size
      end
    end

    if not fine then
      -- From its code on: since Redis 7 an error comes in a table; before, it may follow the script's line.
      local message = type(failure) == 'table' and failure.err or failure
      errors = errors or {}
      errors[#errors + 1] = string.match(message, '%u%u+ [^\r\n]*') or 'ERR ' .. message
      for place = 1, size do
        reply[1 + passed + place] = pack('<dddd', -#errors, 0, 0, 0)
      end
      passed = passed + size
    end
  end
end

local packed = reply and table.concat(reply, '', 1, passed + 1) or pack('<d', now)
if errors then
  return { packed, unpack(errors) }
end
return packed
