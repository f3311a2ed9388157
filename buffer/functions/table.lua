-- A table's records. KEYS[1] of every function is the table's prefix P; all keys share its hash tag. KEYS[2], where given, is no
-- key but P and the table's identity: a server that came back empty has another table of this name, if any.
--
--   P state       string: counters as doubles, see below; rewritten whole by every change
--   P config      string: msgpack {columns, limits, stage...}, each msgpack as the clients wrote it; see buffer/layout.py
--   P ended       hash: end state, or "state(reason)" -> rows since the run began
--   P marks       hash: producer -> last sequence put
--   P clients     hash: name of a client -> its worker
--   P logged      hash: chunk -> rows of batch-log entries whose chunk was not put yet (the server came back older)
--   P chunk:<id>  string, one per put: msgpack of its runs, then of {rows, rows of a group, ordinal, bytes, ms of the put, last step,
--                 how rows ended, tokens, pieces of each unit}
--   P payload:<chunk>/<unit>.<client>.<serial>  string: one Arrow record batch without its schema; set by clients, unlinked here
--   P ready:<i>   sorted set of what stage i can claim, in the order of its selector: chunks (fifo: ordinal, fresh_first:
--                 -ordinal), or units "chunk#index" (uniform, prioritized: the time at which they ring)
--   P priority:<i>  hash: unit -> rate, where it is not 1 (prioritized)
--   P open:<i>    sorted set: ordinal -> chunk with rows that still wait for stage i (stages with min_batch)
--   P since:<i>   sorted set: milliseconds since when a chunk has ready rows (stages with min_batch)
--   P groups:<i>  sorted set: milliseconds at which an incomplete unit "chunk#index" is over (stages with a group deadline)
--   P leases      hash: <client>.<slot> -> msgpack {serial, deadline in ms, stage, worker, chunk, first, count, ...},
--                 or {serial, 0, ms, call} once a call of its owner has ended it
--   P trained     sorted set: step -> "chunk:first:count" not yet covered by a checkpoint
--   P dead        sorted set: milliseconds -> "chunk:first:count:stage" of dead letters
--   P waiters     hash: waiter -> msgpack {until_ms, worker, since_ms, stage (0: room), rows, settled or bytes, ...}
--   P waiting:<i> sorted set: milliseconds -> waiter for stage i (0: for room)
--   P wake:<waiter>   list: one token wakes the waiter
--   P fetch       list: payload of the last claim, by what follows "P payload:"; in no append-only file
--
-- A chunk holds n rows in groups of g. Its rows are *runs* of equal rows {count, policy version (-1: unknown), signature}, so that
-- rows which move together cost what one row costs. A signature has one character for each of:
--   the end state   o live, t trained, T trained and durable, d done, f filtered, s stale, x dead, X dead and dropped
--   the uses        '0' + n
--   each unit       1 when its columns are there, else 0
--   each stage, two w waiting, c complete but for its siblings, r ready, l leased, a done, s skipped (the row ended elsewhere),
--                   and the deliveries so far as '0' + n
-- What an operation makes of a signature (`move`), and what that makes of the counters and indexes (`change_of`), is computed once and
-- remembered.
--
-- Nothing is rolled back: every function checks all that can fail before its first write.

local US, RS = '\31', '\30'
local FIRST = 48            -- counts in signatures are characters from '0' on
local SOME = 500            -- arguments per command: far below the limit of unpack
local MOST_LEARNT = 20000
local MOST_KEPT, KEPT_BYTES = 512, 4096  -- records kept as values, twice as many at most, and how long they may be

-- Fields of the state: of the table, and per stage (stage 0 is room for a put; only its waiters count).
local VERSION, ADMITTED, ENDED, DROPPED, BYTES, ORDINAL, DURABLE, REDELIVERED = 1, 2, 3, 4, 5, 6, 7, 8
local FENCED, USES, DUE, CLOSED, TRAINER, COMMITS, DEAD, LOGGED = 9, 10, 11, 12, 13, 14, 15, 16
local FIELDS = 16
local READY, LEASED, PAST, TAKEN, WAITERS, LEAST, CLOCK = 1, 2, 3, 4, 5, 6, 7
local STAGE_FIELDS = 7

local configs, configs_known = {}, 0

local function base_of(i) return FIELDS + i * STAGE_FIELDS end

local function read_config(prefix, packed, version)
  local blobs = cmsgpack.unpack(packed)
  local config = cmsgpack.unpack(blobs[2])
  local columns = cmsgpack.unpack(blobs[1])
  config.schema, config.units, config.identity = columns.schema, columns.units, columns.identity
  config.stages, config.pos, config.base, config.grouped, config.timed, config.every = {}, {}, {}, {}, {}, {}
  config.unit_moves, config.unit_names = {}, {}
  config.version, config.memo, config.learnt, config.usual_rows = version, {}, 0, 64
  config.target, config.key = prefix .. config.identity, {}
  for name, suffix in pairs(KEY) do config.key[name] = prefix .. suffix end
  local unit_of = {}
  for j, names in ipairs(config.units) do
    for _, name in ipairs(names) do unit_of[name] = j end
  end
  for i = 1, #blobs - 2 do
    local stage, units = cmsgpack.unpack(blobs[i + 2]), {}
    for _, name in ipairs(stage.needs) do units[unit_of[name]] = true end
    stage.units = {}
    for j = 1, #config.units do
      if units[j] then stage.units[#stage.units + 1] = j end
    end
    stage.by_unit = stage.selector == 'uniform' or stage.selector == 'prioritized'
    stage.grouped = stage.scope == 'group' or stage.scope == 'chunk' or (stage.scope == 'batch' and stage.by_unit)
    stage.key, stage.moves = {}, {}
    for _, name in ipairs({'ready', 'priority', 'open', 'since', 'groups', 'waiting'}) do
      stage.key[name] = config.key[name] .. i
    end
    for _, name in ipairs({'lease', 'done', 'join'}) do stage.moves[name] = name .. i end
    if stage.grouped then config.grouped[#config.grouped + 1] = i end
    if stage.group_deadline_ms then config.timed[#config.timed + 1] = i end
    config.stages[i] = stage
    config.every[i] = i
    config.pos[i] = 1 + #config.units + 2 * i
    config.base[i] = base_of(i)
  end
  config.base[0] = base_of(0)
  config.width = 2 + #config.units + 2 * #config.stages
  config.fields = base_of(#config.stages + 1)
  config.format = '<' .. string.rep('d', config.fields)
  config.no_pieces = {}
  for j in ipairs(config.units) do config.no_pieces[j] = '' end
  config.blank = 'o0' .. string.rep('0', #config.units) .. string.rep('w0', #config.stages)
  for j in ipairs(config.units) do config.unit_moves[j], config.unit_names[j] = 'unit' .. j, j .. ',' end
  return config
end

-- What records in the server mean, by their text: those that calls wrote last need not be unpacked again. The same text always means
-- the same, whoever wrote it. Who takes a value may change it, and keeps it under its new text.
local kept, kept_before, kept_count = {}, {}, 0

local function keep(packed, value)
  if #packed > KEPT_BYTES then return end
  if kept_count == MOST_KEPT then kept, kept_before, kept_count = {}, kept, 0 end
  kept[packed], kept_count = value, kept_count + 1
end

local function take_kept(packed)
  local value = kept[packed]
  if value then
    kept[packed] = nil
  else
    value = kept_before[packed]
    kept_before[packed] = nil
  end
  return value
end

local second, second_ms  -- the last one that was told, and its milliseconds: text costs more than numbers

-- The table of this call, or nil when the server does not know it.
local function open_table(keys)
  local prefix = keys[1]
  local packed, config = redis.call('GET', prefix .. KEY.state), configs[prefix]
  if not packed then return nil end
  local state = config and config.packed == packed and config.state
  if not state then
    local version = string.sub(packed, 1, 8)
    if not config or config.version ~= version then
      config = read_config(prefix, redis.call('GET', prefix .. KEY.config), version)
      if configs_known > 1000 then configs, configs_known = {}, 0 end
      configs[prefix], configs_known = config, configs_known + 1
    end
    state = {struct.unpack(config.format, packed)}
  end
  config.packed = nil  -- until `commit` has written what this call makes of it
  if keys[2] and keys[2] ~= config.target then return nil end
  local time = redis.call('TIME')
  if time[1] ~= second then second, second_ms = time[1], time[1] * 1000 end
  return {
    prefix = prefix, config = config, key = config.key, stages = config.stages, state = state, chunks = {},
    now = second_ms + math.floor(time[2] / 1000), ended = false, order = {nil},  -- made with room for one
  }
end

-- A function of a table: fn(table, arguments); `missed(prefix, arguments)` answers when the server does not know the table.
local function of_table(name, fn, flag, missed)
  register(name, function(keys, args)
    local t = open_table(keys)
    if t then return fn(t, args) end
    return missed and missed(keys[1], args) or {'unknown'}
  end, flag)
end

local function stage_state(t, i, field) return t.state[t.config.base[i] + field] end

local function add_to(t, i, field, by)
  local at = t.config.base[i] + field
  t.state[at] = t.state[at] + by
end

local function waiting_rows(t, i)
  return t.state[ADMITTED] - stage_state(t, i, READY) - stage_state(t, i, LEASED) - stage_state(t, i, PAST)
end

local function live_rows(t) return t.state[ADMITTED] - t.state[ENDED] end

-- Stages that were added after this signature was written: live rows wait for them, ended ones are past.
local function widened(config, sig)
  while #sig < config.width do
    local stage = config.stages[(#sig - 2 - #config.units) / 2 + 1]
    local live = string.sub(sig, 1, 1) == 'o'
    sig = sig .. (live and 'w0' or stage.ended and 'a0' or 's0')
  end
  return sig
end

-- A chunk's record is two values in a row: its runs, and what changes less often. The latter's text is `rest`; who changes one of
-- its fields makes the chunk dirty.
local function unpack_chunk(packed)
  local at, runs = cmsgpack.unpack_one(packed)
  local _, f = cmsgpack.unpack_one(packed, at)
  return {
    runs = runs, n = f[1], group = f[2], ordinal = f[3], bytes = f[4], at = f[5], last = f[6], why = f[7], tokens = f[8], pieces = f[9],
    rest = string.sub(packed, at + 1), id = false, before = false, counted = false, dirty = false, ends = false,
  }
end

-- How rows of the chunk ended, oldest first: {first, count, state, step, reason} with separators.
local function ends_of(chunk)
  local ends = chunk.ends
  if ends then
    chunk.why, chunk.ends = chunk.why .. table.concat(ends), false
  end
  return chunk.why
end

local function pack_chunk(chunk)
  if chunk.dirty then
    chunk.dirty = false
    chunk.rest = cmsgpack.pack({
      chunk.n, chunk.group, chunk.ordinal, chunk.bytes, chunk.at, chunk.last, ends_of(chunk), chunk.tokens, chunk.pieces,
    })
  end
  local packed = cmsgpack.pack(chunk.runs) .. chunk.rest
  keep(packed, chunk)
  return packed
end

local function read_chunk(t, id, packed)
  if not packed then
    t.chunks[id] = false
    return nil
  end
  local chunk = take_kept(packed) or unpack_chunk(packed)
  chunk.id = id
  if #chunk.runs[3] < t.config.width then
    for k = 3, #chunk.runs, 3 do chunk.runs[k] = widened(t.config, chunk.runs[k]) end
  end
  chunk.before, chunk.counted = chunk.runs, false
  t.chunks[id] = chunk
  t.order[#t.order + 1] = chunk
  return chunk
end

-- The chunk, read once per call; nil when it was freed.
local function chunk_of(t, id)
  local known = t.chunks[id]
  if known ~= nil then return known or nil end
  return read_chunk(t, id, redis.call('GET', t.key.chunk .. id))
end

-- Read chunks ids[from] to ids[to] that will be asked for, all at once.
local function prefetch(t, ids, from, to)
  if to <= from then return end
  local names, keys, asked, n = {}, {}, {}, 0
  for k = from, math.min(to, #ids) do
    local id = ids[k]
    if t.chunks[id] == nil and not asked[id] and n < SOME then
      n, asked[id] = n + 1, true
      names[n], keys[n] = id, t.key.chunk .. id
    end
  end
  if n < 2 then return end
  for k, packed in ipairs(redis.call('MGET', unpack(keys))) do read_chunk(t, names[k], packed) end
end

-- Call fn(chunk, ranges) for {chunk, first, count, ...} in `flat` from `at` on, chunk by chunk; freed ones are left out.
local function each_chunk(t, flat, at, fn)
  if #flat == at + 2 then
    local chunk = chunk_of(t, flat[at])
    if chunk then fn(chunk, {flat[at + 1], flat[at + 2]}) end
    return
  end
  local order, lists = {}, {}
  for k = at, #flat, 3 do
    local id, first, count = flat[k], flat[k + 1], flat[k + 2]
    local list = lists[id]
    if list then
      local n = #list
      if list[n - 1] + list[n] == first then
        list[n] = list[n] + count
      else
        if first < list[n - 1] then list.unsorted = true end
        list[n + 1], list[n + 2] = first, count
      end
    else
      lists[id], order[#order + 1] = {first, count}, id
    end
  end
  prefetch(t, order, 1, #order)
  for _, id in ipairs(order) do
    local chunk, list = chunk_of(t, id), lists[id]
    if list.unsorted then
      local pairs_, sorted = {}, {}
      for k = 1, #list, 2 do pairs_[#pairs_ + 1] = {list[k], list[k + 1]} end
      table.sort(pairs_, function(a, b) return a[1] < b[1] end)
      for _, one in ipairs(pairs_) do
        local n = #sorted
        if n > 0 and sorted[n - 1] + sorted[n] == one[1] then
          sorted[n] = sorted[n] + one[2]
        else
          sorted[n + 1], sorted[n + 2] = one[1], one[2]
        end
      end
      list = sorted
    end
    if chunk then fn(chunk, list) end
  end
end

local function all_rows(chunk) return {0, chunk.n} end

local function unlink(keys)
  for from = 1, #keys, SOME do redis.call('UNLINK', unpack(keys, from, math.min(from + SOME - 1, #keys))) end
end

local slashes = {}  -- between chunk and name, by unit

local function slash(unit)
  local text = slashes[unit]
  if not text then
    text = '/' .. unit .. '.'
    slashes[unit] = text
  end
  return text
end

local function payload_key(prefix, chunk, unit, name) return prefix .. KEY.payload .. chunk .. slash(unit) .. name end

-- Put the keys of a chunk and of its payload behind the n that are there; returns how many there are now.
local function add_keys(t, chunk, keys, n)
  local find, sub, head, all = string.find, string.sub, t.key.payload .. chunk.id, chunk.pieces
  for j = 1, #all do
    local pieces, from = all[j], 1
    while from <= #pieces do
      local stop = find(pieces, ':', from, true)
      n = n + 1
      keys[n] = head .. slash(j) .. sub(pieces, from, stop - 1)
      from = find(pieces, ';', stop, true) + 1
    end
  end
  keys[n + 1] = t.key.chunk .. chunk.id
  return n + 1
end

-- Rows that one claim takes together: 1, a group or the whole chunk.
local function unit_rows(chunk, stage)
  if stage.scope == 'chunk' then return chunk.n end
  return stage.grouped and chunk.group or 1
end

local function has(runs, at, byte)
  for k = 3, #runs, 3 do
    if string.byte(runs[k], at) == byte then return true end
  end
  return false
end
