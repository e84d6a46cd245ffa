-- Bans: since when denials of a charge are counted, and how many there are; until when the last ban lasts; and its level, the number
-- of times that the next one is doubled. Denials and level are one number. Without denials, the first number is the time when the
-- last ban began. quota is the number of denials that begin a ban, x the window of denials, y the first length and z the longest.

local ban = { read = false, deny = false, begin = false, state = false }

-- Reads the bans of a charge, and returns whether one is in force.
function ban.read(bans)
  local value, since, packed, til, expires = call('GET', bans.key), 0, 0, 0, 0
  if value and #value == 32 then
    since, packed, til, expires = unpack_numbers('<dddd', value)
    if not (0 <= since and since < EXACT and 0 <= packed and packed < EXACT and 0 <= til and til < EXACT) then
      since, packed, til, expires = 0, 0, 0, 0
    end
  end
  local level = packed % LEVELS
  local denials = (packed - level) / LEVELS
  if since > now and since > now + math.min(SLACK, bans.x) then
    -- The clock was set back. A ban that ends within the longest one stays, whichever policy has begun it.
    denials = 0
    if since > now + SLACK then
      expires = 0
      if til > now + bans.z then
        since, til, level = 0, 0, 0
      end
    end
  elseif denials > 0 and since + bans.x <= now then
    denials = 0
  end
  bans.since, bans.denials, bans.til, bans.level, bans.expires = since, denials, til, level, expires
  return til > now
end

-- The level at a time: one step less for each window without a ban.
local function decayed(bans, at)
  local span = at - bans.til
  return math.max(0, bans.level - (span - span % bans.x) / bans.x)
end

local function forgotten(bans)
  local til = bans.til + bans.level * bans.x
  return bans.denials > 0 and math.max(til, bans.since + bans.x) or til
end

-- What is stored expires no earlier than before: a policy of the same name may have a longer window.
local function store(bans)
  local til = math.max(forgotten(bans), math.min(bans.expires - SLACK, now + YEAR_US))
  write(bans.key, bans.since, bans.denials * LEVELS + bans.level, bans.til, bans.expires, til)
end

-- Counts a denial, with the last of which a ban begins.
function ban.deny(bans)
  bans.denials = bans.denials + 1
  if bans.denials == 1 then
    bans.since = now
  end
  if bans.denials >= bans.quota then
    local level = decayed(bans, now)
    local length = math.min(bans.z, bans.y * 2 ^ level)
    bans.since, bans.denials, bans.til = now, 0, now + length
    bans.level = length < bans.z and level + 1 or level
  end
  store(bans)
end

-- Begins a ban of this length, unless a longer one is in force.
function ban.begin(bans, length)
  local til = now + math.min(length, bans.z)
  if til > bans.til then
    -- A window that has begun undoes a step too, so that the next ban after denials is no longer for this one.
    bans.level = decayed(bans, til + bans.x - 1)
    bans.since, bans.denials, bans.til = now, 0, til
  end
  store(bans)
end

-- The denials that remain, the rest of the ban, and the time until all is forgotten.
function ban.state(bans)
  local reset = math.max(0, forgotten(bans) - now)
  if bans.til <= now then
    return math.max(1, bans.quota - bans.denials), 0, reset
  end
  return 0, bans.til - now, reset
end
