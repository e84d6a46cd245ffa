-- Slots: a sorted set with one member for each lease, scored with its expiry. A charge fits while the weights of the leases
-- that have not expired leave room for it. The id of a lease, which the client chooses, comes in place of two parameters.
--
-- The name of a member is four doubles: the two parts of the id, the length of the lease and its weight. While some
-- weigh more than 1, a member `#` at rank 0 has the score -(total weight - number of leases). Requests that wait for slots have places
-- in the same set, see `lua/slot_queue.lua`.

if concurrency then
  -- Finds those that have ended, which are removed later: those that have expired, and if more than `most` is held then, those of
  -- a clock that is gone.
  local function find_ended(held, most)
    -- Counts members as ended.
    local function end_all(members)
      for _, member in ipairs(members) do
        held.ended[#held.ended + 1] = member
        if #member == PLACE_BYTES then
          held.ended[#held.ended + 1] = '>' .. member
          held.is_ended[member] = true
          held.places, held.places_ended, held.total = held.places - 1, held.places_ended + 1, held.total + 1
        elseif held.marked > 0 then
          local _, _, _, weight = unpack_numbers('<dddd', member)
          held.total, held.extra = held.total - weight + 1, held.extra - weight + 1
        end
      end
      held.total = held.total - #members
    end

    -- Until when a member may be ahead of the clock. One that is ahead by less than its length may be alive: its next renewal is
    -- by the clock that was set back.
    local function latest(member)
      if #member == PLACE_BYTES then
        return now + 2 * PLACE_US
      end
      local _, _, length = unpack_numbers('<ddd', member)
      return now + 2 * length
    end

    if held.first_at and held.first_at <= now then
      end_all(call('ZRANGEBYSCORE', held.key, '(0', digits(now), 'LIMIT', '0', 'BOUND'))
    end
    if held.total <= most or held.newest <= now or held.newest <= latest(held.last) then
      return
    end
    -- The newest first.
    local after, gone = '(' .. digits(now), {}
    local members = call('ZREVRANGEBYSCORE', held.key, '(QUEUE_AT', after, 'WITHSCORES', 'LIMIT', '0', 'BOUND')
    held.newest = now
    for i = 1, #members, 2 do
      local at = tonumber(members[i + 1])
      if at <= latest(members[i]) then
        held.newest = at
        break
      end
      gone[#gone + 1] = members[i]
    end
    end_all(gone)
  end

  -- Reads what the leases of a key weigh, what of that is beyond 1 each, what `#` says of that, and when the last one expires.
  -- Finds those that have ended, and returns also the room as it was stored.
  local function read(key, weight, quota)
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
      if held.newest >= QUEUE_AT then
        local queue = slot_queue or make_slot_queue()
        queue.find(held)
      end
      local room_stored = quota - held.total
      if held.first_at and held.first_at <= now or held.total + weight > quota then
        find_ended(held, quota - weight)
      end
      return held, room_stored
    end
    return held, quota
  end

  -- Removes those that have ended, and writes what the others weigh, unless the operation only reads.
  local function remove_ended(held)
    if operation == 'peek' then
      return
    end
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
      local last = held.is_ended and slot_queue.last_held(held) or call('ZRANGE', held.key, '-1', '-1', 'WITHSCORES')
      held.newest = tonumber(last[2])
    end
    call('PEXPIREAT', held.key, expiry(held.newest))
  end

  local find_own, remove
  if rest then
    -- When the lease of this name and the place of the request expire.
    function find_own(held, name, place)
      local held_until = false
      if operation == 'check' or operation == 'peek' or operation == 'charge' then
        return false, false
      elseif operation ~= 'reserve' then
        remove_ended(held)
        held_until = call('ZSCORE', held.key, name)
      end
      local is_there = held.is_ended and operation ~= 'renew' and not held_until and not held.is_ended[place]
      return held_until, is_there and call('ZSCORE', held.key, place)
    end

    -- Removes a lease.
    function remove(held, name, cost)
      call('ZREM', held.key, name)
      held.total, held.extra = held.total - cost, held.extra - cost + 1
      held.newest = now
      if held.total + (held.places or 0) > 0 then
        local last = held.is_ended and slot_queue.last_held(held) or call('ZRANGE', held.key, '-1', '-1', 'WITHSCORES')
        held.newest = tonumber(last[2])
      end
    end
  end

  -- Decides a charge of slots.
  function concurrency(key, times, rest, cost, quota, length, high, low, request)
    cost = math.min(cost, HEAVIEST)
    local held, room_stored = read(key, times * cost, quota)
    local room = math.max(0, quota - held.total)
    local queue = held.is_ended and slot_queue.read(held, room + cost + 1)
    local name, place = pack('<dddd', high, low, length, cost), rest and pack('<ddd', high, low, cost)
    local held_until, place_until, queues, is_later = false, false, false, false
    if rest then
      held_until, place_until = find_own(held, name, place)
    end
    if queue then
      room = slot_queue.room_before(queue, held, room, place_until and place)
    end

    local fits = room >= times * cost
    local counted, waits, ends, wait = fits and times or 0, not fits, operation ~= 'refund', RETRY_US
    if rest then
      local is_behind, own = request.lacks_slots, held_until and operation == 'renew' and math.max(room, cost) or room
      if operation == 'reserve' then
        queues = (slot_queue or make_slot_queue()).may_enter(held, request.deciding, place_until, cost, quota)
      end
      request.lacks_slots = is_behind or queues and not fits
      local own_turn, refunded_at = queues and not fits and now or nil, nil
      counted, waits, refunded_at = rest(request, own, held_until and times or counted, cost, quota, own_turn)
      ends, is_later = ends or refunded_at, counted > 0 and request.turn > now
      if own_turn and request.queues or is_later then
        waits, wait = true, is_later and now - request.turn or -PLACE_US
      end
      -- A request is in the queues up to the first limit without room.
      queues = queues and request.queues and not is_behind
    end
    if counted > 0 and not is_later or operation == 'renew' and (held_until or fits) then
      put(held, name, cost, length, held_until)
    elseif held_until and ends and operation ~= 'renew' then
      remove(held, name, cost)
    elseif waits and not queues and not place_until then
      keep(key, held.newest)
    end
    if queues or place_until and ends then
      remove_ended(held)
      slot_queue.move(held, place, place_until, queues)
    end
    -- A key that loses its last member cannot be created again on a node from which its slot is moving, so this is last.
    remove_ended(held)
    room = math.max(0, quota - held.total)
    if queue or queues then
      room = slot_queue.room_left(queue or {}, held, room, room_stored, queues and not place_until and cost or 0)
    end
    return counted, room, waits and wait or 0, held.newest > now and held.newest - now or 0
  end
end
