-- Slots: a sorted set with one member for each lease, scored with its expiry. A charge fits while the weights of the leases
-- that have not expired leave room for it. The id of a lease, which the client chooses, comes in place of two parameters.
--
-- The name of a member is four doubles: the two parts of the id, the length of the lease and its weight. While some
-- weigh more than 1, a member `#` at rank 0 has the score -(total weight - number of leases).

if concurrency then
  -- Reads what the leases of a key weigh, what of that is beyond 1 each, what `#` says of that, and when the last one expires.
  local function read(key)
    local held = { key = key, total = call('ZCARD', key), extra = 0, marked = 0, newest = now, ended = {} }
    if held.total > 0 then
      local first, first_at, second, second_at = unpack(call('ZRANGE', key, '0', '1', 'WITHSCORES'))
      if first == '#' then
        held.extra, held.marked, held.total = -first_at, -first_at, held.total - 1 - first_at
        first, first_at = second, second_at
      end
      held.first_at = first and tonumber(first_at)
      local last_at
      held.last, last_at = unpack(call('ZRANGE', key, '-1', '-1', 'WITHSCORES'))
      held.newest = tonumber(last_at)
    end
    return held
  end

  -- Counts members as ended, which are removed later.
  local function end_all(held, members)
    for _, member in ipairs(members) do
      held.ended[#held.ended + 1] = member
      if held.marked > 0 then
        local _, _, _, weight = unpack_numbers('<dddd', member)
        held.total, held.extra = held.total - weight + 1, held.extra - weight + 1
      end
    end
    held.total = held.total - #members
  end

  -- Finds those that have expired.
  local function find_expired(held)
    if held.first_at and held.first_at <= now then
      end_all(held, call('ZRANGEBYSCORE', held.key, '(0', digits(now), 'LIMIT', '0', 'BOUND'))
    end
  end

  -- Finds those of a clock that is gone, the newest first. One that lies ahead by less than its length may be alive: its next
  -- renewal is by the clock that was set back.
  local function find_gone(held)
    local _, _, length = unpack_numbers('<ddd', held.last)
    if held.newest <= now + 2 * length then
      return
    end
    local after = '(' .. digits(now)
    local members = call('ZREVRANGEBYSCORE', held.key, '+inf', after, 'WITHSCORES', 'LIMIT', '0', 'BOUND')
    local gone = {}
    held.newest = now
    for i = 1, #members, 2 do
      local at = tonumber(members[i + 1])
      _, _, length = unpack_numbers('<ddd', members[i])
      if at <= now + 2 * length then
        held.newest = at
        break
      end
      gone[#gone + 1] = members[i]
    end
    end_all(held, gone)
  end

  -- Removes those that have ended, and writes what the others weigh.
  local function remove_ended(held)
    if #held.ended > 0 then
      call('ZREM', held.key, unpack(held.ended))
      held.ended = {}
    end
    if held.extra ~= held.marked then
      if held.extra > 0 then
        call('ZADD', held.key, -held.extra, '#')
      else
        call('ZREM', held.key, '#')
      end
      held.marked = held.extra
    end
  end

  -- Adds a lease, or renews the one that expires at `held_until`.
  local function put(held, name, cost, length, held_until)
    if not held_until then
      held.total, held.extra = held.total + cost, held.extra + cost - 1
    end
    held.newest = math.max(held.newest, now + length)
    if held.extra > 0 and held.extra ~= held.marked then
      call('ZADD', held.key, now + length, name, -held.extra, '#')
      held.marked = held.extra
    else
      call('ZADD', held.key, now + length, name)
    end
    -- The one that was the last, where the clock was set back.
    if held_until and tonumber(held_until) > now + length then
      held.newest = tonumber(call('ZRANGE', held.key, '-1', '-1', 'WITHSCORES')[2])
    end
    call('PEXPIREAT', held.key, expiry(held.newest))
  end

  -- Removes a lease.
  local function remove(held, name, cost)
    call('ZREM', held.key, name)
    held.total, held.extra = held.total - cost, held.extra - cost + 1
    held.newest = held.total > 0 and tonumber(call('ZRANGE', held.key, '-1', '-1', 'WITHSCORES')[2]) or now
  end

  -- Decides a charge of slots.
  function concurrency(key, times, rest, cost, quota, length, high, low, request)
    cost = math.min(cost, HEAVIEST)
    local held = read(key)
    find_expired(held)
    if held.total + times * cost > quota and held.newest > now then
      find_gone(held)
    end

    local name, held_until = pack('<dddd', high, low, length, cost), false
    if operation == 'renew' or operation == 'end' or operation == 'refund' then
      remove_ended(held)
      held_until = call('ZSCORE', key, name)
    end
    local room = math.max(0, quota - held.total)
    local fits = room >= times * cost
    local counted, waits, refunded_at = fits and times or 0, not fits, nil
    if rest then
      local own = held_until and operation == 'renew' and math.max(room, cost) or room
      counted, waits, refunded_at = rest(request, own, held_until and times or counted, cost, quota)
    end

    if counted > 0 or operation == 'renew' and (held_until or fits) then
      put(held, name, cost, length, held_until)
    elseif held_until and (refunded_at or operation == 'end') then
      remove(held, name, cost)
    elseif waits then
      keep(key, held.newest)
    end
    -- A key that loses its last member cannot be created again on a node from which its slot is moving, so this is last.
    if operation ~= 'peek' then
      remove_ended(held)
    end
    room = math.max(0, quota - held.total)
    return counted, room, waits and RETRY_US or 0, held.newest > now and held.newest - now or 0
  end
end
