-- The line of a key: the requests that wait, of each process those that come first. Nothing is counted for them, and a check
-- admits only what fits after all that have arrived before.
--
-- A text of doubles: for each process its number, the number of its line, when its place expires, how many requests it has, and for
-- each of these when it has arrived and its cost.

-- The function of a charge with a line, in place of `rest`, and what is done when its rule has returned.
local in_line, after_line

if has_lines then
  -- Reads the places that have not expired, without those of a clock that is gone.
  local function read(key)
    local text, places, at, left = call('GET', key) or '', {}, 1, BOUND
    while at + 32 <= #text + 1 and left > 0 do
      local place = {}
      place.process, place.line, place.til, place.size, at = unpack_numbers('<dddd', text, at)
      local held = now < place.til and place.til <= now + PLACE_US
      for n = 1, math.min(place.size, left, math.floor((#text + 1 - at) / 16)) do
        place[2 * n - 1], place[2 * n], at = unpack_numbers('<dd', text, at)
        left = left - 1
      end
      if held and place[1] then
        places[#places + 1] = place
      end
    end
    return places
  end

  -- Writes the places, which expire with the last one.
  local function write(key, places)
    local texts, last = {}, 0
    for _, place in ipairs(places) do
      if place[1] then
        last = math.max(last, place.til)
        texts[#texts + 1] = pack('<dddd', place.process, place.line, place.til, #place / 2)
        for n = 1, #place, 2 do
          texts[#texts + 1] = pack('<dd', place[n], place[n + 1])
        end
      end
    end
    if last > 0 then
      call('SET', key, table.concat(texts), 'PXAT', expiry(last - SLACK))
    else
      call('UNLINK', key)
    end
  end

  -- The weight that has arrived before a time: without the place with this line, or without those of its requests that are decided.
  local function weight_before(places, arrived, own, decided)
    local weight = 0
    for _, place in ipairs(places) do
      local is_own = place.line == own
      if not is_own or decided then
        for n = 1, #place, 2 do
          if place[n] < arrived and not (is_own and decided[place[n]]) then
            weight = weight + place[n + 1]
          end
        end
      end
    end
    return weight
  end

  -- The weight that comes before the nth of the requests that are decided. The order of the requests of one process in the line that
  -- they lead is that of the process.
  local function before(request, charge, n)
    local arrived = request.waiting and request.waiting[2 * n - 1]
    if not arrived then
      return weight_before(charge.places, math.huge)
    end
    return weight_before(charge.places, arrived, charge.line, not charge.leads and request.decided)
  end

  -- How many of the requests that are decided fit.
  local function fitting(request, charge, room, cost)
    local fits = 0
    while fits < request.times and before(request, charge, fits + 1) + (fits + 1) * cost <= room do
      fits = fits + 1
    end
    return fits
  end

  -- The time until so much fits, if nothing else is added: each quota that is more than the first takes a cycle more.
  local function time_until(request, charge, total)
    local quota, of = charge[C_QUOTA], operation
    local cycles = total > quota and math.ceil(total / quota) - 1 or 0
    local function looks(_, room, _, cost)
      return 0, room < cost
    end
    operation = 'peek'
    local _, _, wait =
      charge[C_RULE](charge.key, 1, looks, total - cycles * quota, quota, charge[C_X], charge[C_Y], charge[C_Z], request)
    operation = of
    return cycles * charge.cycle + wait
  end

  local function place_of(places, own)
    for _, place in ipairs(places) do
      if place.line == own then
        return place
      end
    end
  end

  -- Ends a decision about requests of a process: those that are admitted leave the line, and those that are denied stand in it if this
  -- charge lacks room for them.
  local function settle(request, charge, admitted, lacks)
    local places, waiting = charge.places, request.waiting
    local place = place_of(places, charge.line)
    if waiting and charge.leads then
      local from = lacks and admitted or request.times
      place = place or {}
      if not place.process then
        places[#places + 1] = place
      end
      for n = #place, 1, -1 do
        place[n] = nil
      end
      for n = 2 * from + 1, #waiting do
        place[#place + 1] = waiting[n]
      end
    elseif waiting then
      local left = {}
      for n = 1, place and #place or 0, 2 do
        if not (request.decided[place[n]] and request.decided[place[n]] <= admitted) then
          left[#left + 1], left[#left + 2] = place[n], place[n + 1]
        end
      end
      if not place or #left == #place then
        return
      end
      for n = 1, #place do
        place[n] = left[n]
      end
    elseif lacks and admitted == 0 and request.may_wait and (not place or #place < 2 * PLACE_SIZE) then
      place = place or {}
      if not place.process then
        places[#places + 1] = place
      end
      place[#place + 1], place[#place + 2] = now, charge[C_COST]
    else
      return
    end
    if charge.leads or not waiting then
      place.process, place.line, place.til = request.process, charge.line, now + PLACE_US
    end
    write(charge.line_key, places)
  end

  -- Wakes the processes whose first requests fit now.
  local function wake(request, charge, room)
    for _, place in ipairs(charge.places) do
      local is_own = operation == 'wait' and charge.leads and place.line == charge.line
      if place[1] and not is_own and weight_before(charge.places, place[1], place.line) + place[2] <= room then
        local channel = string.match(charge.line_key, '^(.-:1:)line:') .. 'wake:' .. digits(place.process)
        -- Without permission for it, the request is checked again within a second.
        redis.pcall('PUBLISH', channel, digits(place.line))
      end
    end
  end

  function in_line(request, room, fits, cost, quota)
    local charge = request.deciding
    charge.key, charge.line_key, request.lines = keys[request.place], keys[request.lines], request.lines + 1
    charge.places = read(charge.line_key)
    if operation == 'wait' or operation == 'check' or operation == 'peek' then
      fits = fitting(request, charge, room, cost)
      charge.lacks = fits < request.times
      -- A request that has just arrived stands in the line only if it may wait for all that it lacks.
      if operation == 'wait' and charge.lacks and not request.waiting then
        local needed = before(request, charge, 1) + charge.ahead + cost
        charge.wait = time_until(request, charge, needed)
        request.may_wait = request.may_wait and charge.longest >= (charge.cycle > 0 and charge.wait or 1)
      end
    end
    local counted, waits, refunded_at = rest(request, room, fits, cost, quota)
    if operation == 'wait' then
      settle(request, charge, counted, charge.lacks)
    end
    return counted, waits, refunded_at
  end

  -- What remains of a charge behind the line, and how long the first request that is not admitted waits.
  function after_line(request, charge, room, wait)
    if operation == 'wait' or operation == 'refund' or operation == 'end' or operation == 'reset' then
      wake(request, charge, room)
    end
    if charge.lacks then
      local next_one = (request.waiting and request.fits or 0) + 1
      local needed = before(request, charge, next_one) + (request.waiting and 0 or charge.ahead or 0) + charge[C_COST]
      wait = charge.wait or time_until(request, charge, needed)
      wait = wait > 0 and wait or SOON_US
    end
    return math.max(0, room - weight_before(charge.places, math.huge)), wait
  end
end
