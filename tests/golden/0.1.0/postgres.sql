SELECT pg_catalog.set_config('search_path', '', false);
CREATE TABLE public.absences (
    instance text NOT NULL,
    unheard_s bigint NOT NULL,
    sequence bigint NOT NULL
);
CREATE TABLE public.checkpoints (
    id text NOT NULL,
    created_ns bigint NOT NULL,
    stream_sequence bigint NOT NULL,
    path text NOT NULL,
    chunks integer NOT NULL,
    bytes bigint NOT NULL
);
CREATE TABLE public.epochs (
    instance text NOT NULL,
    epoch bigint NOT NULL,
    started_ns bigint NOT NULL,
    ended_ns bigint,
    end_reason text NOT NULL,
    next_offset bigint NOT NULL,
    digest character varying(16) NOT NULL,
    run text DEFAULT ''::text NOT NULL
);
CREATE TABLE public.forgotten (
    instance text NOT NULL,
    stream text NOT NULL,
    sequence bigint NOT NULL,
    until_ns bigint NOT NULL,
    pulse_ns bigint NOT NULL,
    declared json NOT NULL
);
CREATE TABLE public.instance_positions (
    instance text NOT NULL,
    epoch bigint NOT NULL,
    next_offset bigint NOT NULL,
    run text DEFAULT ''::text NOT NULL
);
CREATE TABLE public.instances (
    id text NOT NULL,
    cluster text NOT NULL,
    epoch bigint NOT NULL,
    first_seen_ns bigint NOT NULL,
    last_frame_ns bigint NOT NULL,
    engine text NOT NULL,
    version text NOT NULL,
    topology json NOT NULL,
    pools json NOT NULL,
    state character varying(8) NOT NULL,
    run text DEFAULT ''::text NOT NULL
);
CREATE TABLE public.kvbm_schema (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.namespaces (
    id bytea NOT NULL,
    model text NOT NULL,
    revision text NOT NULL,
    kv_dtype text NOT NULL,
    block_tokens bigint NOT NULL,
    layout text NOT NULL,
    kv_group bigint NOT NULL,
    ranks text NOT NULL,
    lora text NOT NULL,
    tenant text NOT NULL,
    scheme text NOT NULL,
    scheme_seed text NOT NULL,
    first_seen_ns bigint NOT NULL,
    CONSTRAINT namespaces_id_bytes CHECK ((length(id) = 16))
);
CREATE TABLE public.object_claims (
    pool text NOT NULL,
    namespace bytea NOT NULL,
    hash bytea NOT NULL,
    first_claimed_by text NOT NULL,
    claimed_ns bigint NOT NULL,
    last_claimed_ns bigint NOT NULL,
    CONSTRAINT object_claims_hash_bytes CHECK ((length(hash) = 16)),
    CONSTRAINT object_claims_namespace_bytes CHECK ((length(namespace) = 16))
);
CREATE TABLE public.positions (
    stream text NOT NULL,
    stream_sequence bigint NOT NULL,
    fingerprint character varying(16),
    is_over boolean DEFAULT false NOT NULL
);
CREATE TABLE public.tenants (
    name text NOT NULL,
    quota_bytes bigint
);
CREATE TABLE public.usage (
    instance text NOT NULL,
    epoch bigint NOT NULL,
    event_offset bigint NOT NULL,
    tenant text NOT NULL,
    since_ms bigint NOT NULL,
    until_ms bigint NOT NULL,
    is_last boolean NOT NULL,
    hbm_byte_seconds bigint NOT NULL,
    host_byte_seconds bigint NOT NULL,
    nvme_byte_seconds bigint NOT NULL,
    object_byte_seconds bigint NOT NULL,
    hbm_put_blocks bigint NOT NULL,
    host_put_blocks bigint NOT NULL,
    nvme_put_blocks bigint NOT NULL,
    object_put_blocks bigint NOT NULL,
    hbm_read_blocks bigint NOT NULL,
    host_read_blocks bigint NOT NULL,
    nvme_read_blocks bigint NOT NULL,
    object_read_blocks bigint NOT NULL,
    saved_tokens bigint NOT NULL,
    unrated_tokens bigint NOT NULL,
    saved_gpu_us bigint NOT NULL
);
INSERT INTO public.epochs VALUES ('golden', 1, 1796135488441830701, 1796135488488002080, 'shutdown', 27, 'c74547af1ebc38dc', '8ca5324727b7acb6');
INSERT INTO public.epochs VALUES ('golden', 2, 1796135488538657692, NULL, '', 27, '067ed6b258276dc5', '00345b8258a943a8');
INSERT INTO public.instance_positions VALUES ('golden', 2, 27, '00345b8258a943a8');
INSERT INTO public.instances VALUES ('golden', 'golden', 2, 1796135488441830701, 1796135488591392085, 'golden', '0.1.0', '["rack-1"]', '[{"tier": "HBM", "slots": 10, "block_bytes": 64, "reach": "INSTANCE", "name": ""}, {"tier": "HOST", "slots": 8, "block_bytes": 64, "reach": "INSTANCE", "name": ""}, {"tier": "NVME", "slots": 12, "block_bytes": 64, "reach": "INSTANCE", "name": ""}, {"tier": "OBJECT", "slots": 0, "block_bytes": 64, "reach": "CLUSTER", "name": "memory://objects"}]', 'live', '00345b8258a943a8');
INSERT INTO public.kvbm_schema VALUES ('0003');
INSERT INTO public.namespaces VALUES ('\x91e3a8311cee931050311907ca210a8e', 'test', 'r1', 'float32', 16, '', 0, 'tp1', '', '', 'sha256', '0', 1796135488441830701);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x5513e3eabba6d75402c1c34c7365c6fa', 'golden', 1796135488451036188, 1796135488451036188);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x9dc6366a2003d418ace6b6c74e29980f', 'golden', 1796135488451036188, 1796135488451036188);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\xa93875fe509ac2fae0e0939d3ec71c4d', 'golden', 1796135488451036188, 1796135488451036188);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\xecbe93f9c7fbf3c6a01b3bff4b6ecdd8', 'golden', 1796135488451036188, 1796135488451036188);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x02925afd44e2946e583a7f6434585a77', 'golden', 1796135488481195113, 1796135488481195113);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x06a89c05b4eae0f2acac44075fe7d5dc', 'golden', 1796135488577079517, 1796135488577079517);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x0ae38aae1700244af22d7d58828ae2a4', 'golden', 1796135488562127535, 1796135488562127535);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x0d7f0e336166042f8cc9e4c20ae427ba', 'golden', 1796135488463355772, 1796135488591392085);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x1032746e7e3338a630f96b947de5165b', 'golden', 1796135488481195113, 1796135488481195113);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x18d6e1cac2a8adaf25577cca14db7753', 'golden', 1796135488463355772, 1796135488591392085);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x1d800ad9f4e99e1c61aa45473623da40', 'golden', 1796135488474546822, 1796135488543467720);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x253d950f11ebdbeb4c2d54c57803deb6', 'golden', 1796135488463355772, 1796135488591392085);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x484aa6ccd17c9fe96eb955b9b56ed0c8', 'golden', 1796135488474546822, 1796135488543467720);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x575671dc5db4dfa97dcab0aedb95930d', 'golden', 1796135488577079517, 1796135488577079517);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x58c0e7476a0d98d74ec64f7d9241c9d5', 'golden', 1796135488474546822, 1796135488543467720);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x5cb0cce7444533ba30bcc9f40a7814c1', 'golden', 1796135488562127535, 1796135488562127535);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x6d27ca189b30af4f85eab024881ab00a', 'golden', 1796135488481195113, 1796135488481195113);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x88a09c48f589386b2d18d8be987cffe6', 'golden', 1796135488562127535, 1796135488562127535);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\x98ce94b2b196906ca4859e068b8ef92e', 'golden', 1796135488474546822, 1796135488543467720);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\xb8db3faf75728b2b9ec1e1dc23d41abc', 'golden', 1796135488577079517, 1796135488577079517);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\xd939926f05444b0f4495fb9629ecbfa8', 'golden', 1796135488463355772, 1796135488591392085);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\xda090f9d21504060cf1f94816217ba80', 'golden', 1796135488562127535, 1796135488562127535);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\xe86574df7434a3b185fb0ee23d093e68', 'golden', 1796135488481195113, 1796135488481195113);
INSERT INTO public.object_claims VALUES ('memory://objects', '\x91e3a8311cee931050311907ca210a8e', '\xfdfc31f701148d549f3f9896f8f8f0f5', 'golden', 1796135488577079517, 1796135488577079517);
INSERT INTO public.positions VALUES ('KVBM/golden@2026-12-01T14:31:27.591126969Z', 22, 'e80fe4c529a3802d', false);
INSERT INTO public.usage VALUES ('golden', 1, 0, '', 1796135488441, 1796135488441, false, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
INSERT INTO public.usage VALUES ('golden', 1, 25, '', 1796135488441, 1796135488487, true, 16, 15, 16, 0, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0);
INSERT INTO public.usage VALUES ('golden', 2, 0, '', 1796135488538, 1796135488538, false, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
ALTER TABLE ONLY public.absences
    ADD CONSTRAINT absences_pkey PRIMARY KEY (instance);
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT checkpoints_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.epochs
    ADD CONSTRAINT epochs_pkey PRIMARY KEY (instance, epoch);
ALTER TABLE ONLY public.forgotten
    ADD CONSTRAINT forgotten_pkey PRIMARY KEY (instance);
ALTER TABLE ONLY public.instance_positions
    ADD CONSTRAINT instance_positions_pkey PRIMARY KEY (instance);
ALTER TABLE ONLY public.instances
    ADD CONSTRAINT instances_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.kvbm_schema
    ADD CONSTRAINT kvbm_schema_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.namespaces
    ADD CONSTRAINT namespaces_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.object_claims
    ADD CONSTRAINT object_claims_pkey PRIMARY KEY (pool, namespace, hash);
ALTER TABLE ONLY public.positions
    ADD CONSTRAINT positions_pkey PRIMARY KEY (stream);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.usage
    ADD CONSTRAINT usage_pkey PRIMARY KEY (instance, epoch, event_offset, tenant, since_ms);
CREATE INDEX ix_forgotten_stream ON public.forgotten USING btree (stream);
CREATE INDEX ix_namespaces_tenant ON public.namespaces USING btree (tenant);
CREATE INDEX ix_usage_since_ms ON public.usage USING btree (since_ms);
