-- The queue for slots: two members for each request that waits, in the sorted set of the leases.
--
-- The name of the first is three doubles: the two parts of the id, of which the second is that of the process, and the weight. It
-- is scored with the time until which the place is held unless it is refreshed. The second is the same name after a `>`. Its score
-- is QUEUE_AT and the time of arrival, so that the places follow the leases in their order.

local slot_queue, make_slot_queue

if concurrency then
  -- Makes the functions of this file, for the first key that has places or request that may get one.
  function make_slot_queue()
    slot_queue = {}

    -- Finds the places of a key, whose last member is one.
    function slot_queue.find(held)
      held.places = call('ZCOUNT', held.key, 'QUEUE_AT', '+inf')
      held.total, held.places_ended, held.is_ended = held.total - 2 * held.places, 0, {}
      local last_at
      held.last, last_at = unpack(slot_queue.last_held(held))
      held.newest = tonumber(last_at) or now
    end

    -- The last lease or place of a key to expire, and when.
    function slot_queue.last_held(held)
      return call('ZREVRANGEBYSCORE', held.key, '(QUEUE_AT', '0', 'WITHSCORES', 'LIMIT', '0', '1')
    end

    -- Reads so many of the first places, and as many more as have ended.
    function slot_queue.read(held, most)
      most = math.min(most + held.places_ended, BOUND)
      return call('ZRANGEBYSCORE', held.key, 'QUEUE_AT', '+inf', 'LIMIT', '0', digits(most))
    end

    -- What is left of the room for a request behind these places, or for the one with the place `own` among them.
    function slot_queue.room_before(queue, held, room, own)
      for _, member in ipairs(queue) do
        local place = string.sub(member, 2)
        if place == own or room <= 0 then
          break
        elseif not held.is_ended[place] then
          local _, _, weight = unpack_numbers('<ddd', place)
          room = room - weight
        end
      end
      return math.max(0, room)
    end

    -- Whether a request may enter the queue, or stay in it.
    function slot_queue.may_enter(held, charge, place_until, cost, quota)
      if charge[C_LONGEST] == 0 or cost > quota then
        return false
      elseif place_until or (held.places or 0) == 0 then
        return place_until or cost <= charge[C_WAITING]
      end
      local queue, units = slot_queue.read(held, BOUND), cost
      for _, member in ipairs(queue) do
        if not held.is_ended[string.sub(member, 2)] then
          local _, _, weight = unpack_numbers('<ddd', member, 2)
          units = units + weight
        end
      end
      return #queue < BOUND and units <= charge[C_WAITING]
    end

    -- Adds a place behind the others, or refreshes the one that expires at `place_until`.
    local function enter(held, place, place_until)
      local held_until = now + PLACE_US
      if place_until then
        call('ZADD', held.key, held_until, place)
      else
        local last = call('ZREVRANGEBYSCORE', held.key, '+inf', 'QUEUE_AT', 'WITHSCORES', 'LIMIT', '0', '1')[2]
        local order = math.max(now + QUEUE_AT, (tonumber(last) or 0) + 1)
        call('ZADD', held.key, held_until, place, order, '>' .. place)
      end
      held.newest = math.max(held.newest, held_until)
      -- The one that was the last, where the clock was set back.
      if place_until and tonumber(place_until) > held_until then
        held.newest = tonumber(slot_queue.last_held(held)[2])
      end
      call('PEXPIREAT', held.key, expiry(held.newest))
    end

    -- Adds the request to the queue, refreshes its place or removes it.
    function slot_queue.move(held, place, place_until, queues)
      if queues then
        enter(held, place, place_until)
      else
        call('ZREM', held.key, place, '>' .. place)
        held.is_ended[place] = true
        held.newest = tonumber(slot_queue.last_held(held)[2]) or now
      end
    end

    -- What is left of the room behind all places, and behind one of this weight that was added now. Wakes the requests whose places
    -- fit now and did not fit as it was stored, unless the operation only reads.
    function slot_queue.room_left(queue, held, room, room_stored, added)
      for _, member in ipairs(queue) do
        local place = string.sub(member, 2)
        local high, low, weight = unpack_numbers('<ddd', place)
        room_stored = room_stored - weight
        if not held.is_ended[place] then
          room = room - weight
          if room >= 0 and room_stored < 0 and operation ~= 'peek' then
            local channel = string.match(held.key, '^(.-:1:)concurrency:') .. 'wake:' .. digits(low)
            -- Without permission for it, the request finds its turn when it refreshes its place.
            redis.pcall('PUBLISH', channel, digits(high))
          end
        end
        if room <= 0 then
          break
        end
      end
      return math.max(0, room - added)
    end

    return slot_queue
  end
end
