-- The line of a key: the requests that wait, of each process those that come first. Nothing is counted for them, and a check
-- admits only what fits after all that have arrived before.
--
-- A text of doubles: for each process its number, the number of its line, when its place expires, how many requests it has, and for
-- each of these when it has arrived and its cost.

-- Reads the places that have not expired, without those of a clock that is gone.
local function read_places(key)
  local text, places, at, left = call('GET', key) or '', {}, 1, ALL_READS
  while at + 31 <= #text and left > 0 do
    local place, size = {}, 0
    place.process, place.line, place.til, size, at = unpack_numbers('<dddd', text, at)
    for n = 1, math.min(size, left, math.floor((#text + 1 - at) / 16)) do
      place[2 * n - 1], place[2 * n], at = unpack_numbers('<dd', text, at)
      left = left - 1
    end
    if place[1] and now < place.til and place.til <= now + PLACE_US then
      places[#places + 1] = place
    end
  end
  return places
end

-- Writes the places, which expire with the last one.
local function write_places(key, places)
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
    call('SET', key, table.concat(texts), 'PXAT', expiry(last))
  else
    call('UNLINK', key)
  end
end

-- The place of a line, which is made if it is not there.
local function place_of(line)
  for _, place in ipairs(line.places) do
    if place.line == line.number then
      return place
    end
  end
  local place = { line = line.number }
  line.places[#line.places + 1] = place
  return place
end

-- The weight that has arrived before a time: without the place of `own`, or without those of its requests that are decided. It is
-- counted until it exceeds `most`.
local function weight_before(places, arrived, own, decided, most)
  local weight = 0
  for _, place in ipairs(places) do
    if most and weight > most then
      break
    end
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
-- they lead is that of the process. `ahead` is what the process knows beyond its place.
local function before(run, line, n)
  local arrived = run.waiting and run.waiting[2 * n - 1]
  local weight = arrived and weight_before(line.places, arrived, line.number, not line.leads and run.decided)
  return math.max(0, (weight or weight_before(line.places, math.huge)) + line.ahead)
end

-- What remains for a request that has just arrived.
local function remaining_behind(line, room)
  return math.max(0, room - weight_before(line.places, math.huge) - math.max(0, line.ahead))
end

-- The time until a request fits behind those before it, or less than that: by default each quota beyond the first takes a cycle more,
-- if there is one. At least that of a request which fits when those before it are admitted.
local function time_until(charge, before)
  local rule, quota, cycle, wait = charge.rule, charge.quota, charge.line.cycle, 0
  before = math.min(before, MAX_TOTAL)
  local total = before + charge.cost
  if total <= charge.room then
    return SOON_US
  elseif rule.wait_behind then
    wait = rule.wait_behind(charge, before, charge.cost, unpack(charge.state, 2, 6))
  else
    local cycles = cycle > 0 and (total - 1 - (total - 1) % quota) / quota or 0
    local cost = total - cycles * quota
    if charge.room < cost then
      wait = cycle > 0 and rule.wait(charge, cost, unpack(charge.state, 2, 6)) or RETRY_US
    end
    wait = cycles * cycle + wait
  end
  return wait > 0 and math.min(wait, LONGEST_WAIT_US) or SOON_US
end

-- Reads the line of a charge, and finds how many of the requests fit behind it.
local function read_line(run, charge, fits)
  local line, operation, times = charge.line, run.operation, run.callers
  run.leads = run.leads or line.waits
  line.places, line.lacks, line.wait = read_places(line.key), false, nil
  if run.waiting and not run.decided then
    run.decided = {}
    for n = 1, times do
      run.decided[run.waiting[2 * n - 1]] = true
    end
  end
  if operation ~= 'wait' and operation ~= 'check' and operation ~= 'peek' then
    return fits
  end
  if run.waiting then
    fits = 0
    while fits < times and before(run, line, fits + 1) + (fits + 1) * charge.cost <= charge.room do
      fits = fits + 1
    end
  else
    local left = remaining_behind(line, charge.room)
    fits = math.min(times, (left - left % charge.cost) / charge.cost)
  end
  line.fits, line.lacks = fits, fits < times or charge.bans and charge.bans.is_in_force
  -- A request that has just arrived stands in the line only if it may wait for all that it lacks.
  if operation == 'wait' and line.lacks and not run.waiting then
    line.wait = time_until(charge, before(run, line, 1))
    -- When slots will be free is not known.
    run.may_wait = run.may_wait and line.longest >= (line.cycle > 0 and line.wait or 1)
  end
  return fits
end

-- The requests of a place without those that are decided, of which several may have arrived at once.
local function without_decided(place, waiting, times)
  local decided, others = {}, {}
  for n = 1, times do
    decided[waiting[2 * n - 1]] = (decided[waiting[2 * n - 1]] or 0) + 1
  end
  for n = 1, #place, 2 do
    local left = decided[place[n]] or 0
    if left > 0 then
      decided[place[n]] = left - 1
    else
      others[#others + 1], others[#others + 2] = place[n], place[n + 1]
    end
  end
  return others
end

-- Ends a decision about requests that wait: those that are admitted leave the line. Those that are denied stand in it if this key
-- lacks room for them, except at their last check, which leads no line. Returns whether other requests stand in the place then.
local function settle(run, charge, admitted)
  local line, waiting, kept, held_from = charge.line, run.waiting, {}, now
  local place = place_of(line)
  if waiting and line.leads then
    for n = 2 * (line.lacks and admitted or run.callers) + 1, #waiting do
      kept[#kept + 1] = waiting[n]
    end
    -- The replies to those that have arrived since are under way. If one is lost, its request is not held for longer.
    local own = #kept
    for n = 1, #place, 2 do
      if line.known < place[n] and now < place[n] + PLACE_US then
        kept[#kept + 1], kept[#kept + 2] = place[n], place[n + 1]
        held_from = own > 0 and now or math.min(place[n], now)
      end
    end
  elseif waiting then
    -- In a line that they do not lead those that are denied are inserted by their arrival.
    kept = without_decided(place, waiting, run.callers)
    for n = line.lacks and run.leads and admitted + 1 or math.huge, run.callers do
      local at = 1
      while at < #kept and kept[at] <= waiting[2 * n - 1] do
        at = at + 2
      end
      table.insert(kept, at, charge.cost)
      table.insert(kept, at, waiting[2 * n - 1])
    end
  elseif line.lacks and run.may_wait and not run.leads and #place < 2 * PLACE_SIZE then
    kept = { unpack(place) }
    kept[#kept + 1], kept[#kept + 2] = now, charge.cost
  else
    return
  end
  local refreshes, changes = line.leads and #kept + #place > 0, false
  for n = 1, math.max(#place, #kept) do
    local number = n <= 2 * PLACE_SIZE and kept[n] or nil
    changes = changes or place[n] ~= number
    place[n] = number
  end
  if changes or refreshes then
    place.process, place.til = run.process, held_from + PLACE_US
    write_places(line.key, line.places)
  end
  return changes
end

-- Wakes the processes whose first requests fit now. After a refund also that of the first of all, which may fit earlier than it knows.
local function wake(run, charge)
  local line, first = charge.line, math.huge
  for _, place in ipairs(line.places) do
    if run.operation == 'refund' and place[1] then
      first = math.min(first, place[1])
    end
  end
  for _, place in ipairs(line.places) do
    local is_own = run.operation == 'wait' and line.leads and place.line == line.number
    local most = charge.room - (place[2] or 0)
    local at = place[1]
    if at and not is_own and (at == first or weight_before(line.places, at, place.line, nil, most) <= most) then
      local channel = string.match(line.key, '^(.-:1:)line:') .. 'wake:' .. string.format('%.0f', place.process)
      -- Without permission for it, the request is checked again within a second.
      redis.pcall('PUBLISH', channel, place.line)
    end
  end
end

-- Ends a decision in the line of a charge. Returns what remains behind it, and how long the first request waits that is not admitted.
local function settle_line(run, charge, admitted)
  local line, operation, wait = charge.line, run.operation, 0
  local wakes = operation == 'refund' or operation == 'end' or operation == 'reset'
  -- A key that has room for the first request which is not admitted does not hold it, though it lacks room for all.
  line.lacks = line.lacks and (line.fits <= admitted or charge.bans and charge.bans.is_in_force)
  if operation == 'wait' or run.waiting then
    wakes = settle(run, charge, admitted) or wakes
  end
  -- Others may fit only if requests have left the place: those of another limit would wake each other without an end.
  if wakes then
    wake(run, charge)
  end
  if line.lacks then
    local nth = run.waiting and admitted + 1 or 1
    wait = line.wait or time_until(charge, before(run, line, nth))
  end
  return remaining_behind(line, charge.room), wait
end
