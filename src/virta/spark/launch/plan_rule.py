"""
Give every query on a loaded log its own plan, so that conditions can be pushed down.

Spark 4.3 keeps one plan of a Python source per loaded DataFrame, in the table object that all queries on it
share: conditions pushed down by one query stay in the plan of the next one, which then misses rows. A rule added
to the session's analyser replaces the table of the format `virta` by one with a plan per query. The rule is
Java, compiled at session start by the compiler that Spark uses for its queries.

It is opt-in: the rule depends on Spark's internals. `session(**{"spark.sql.python.filterPushdown.enabled": True})`
adds it and checks that it took effect.

Invariants: a session has the rule, or no conditions are pushed. All queries on a loaded DataFrame see the log up to
the same end, the one it had at the first of them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from virta.errors import VirtaError
from virta.spark.source.options import OWN_PLAN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("virta.spark")

PUSHDOWN_SETTING = "spark.sql.python.filterPushdown.enabled"

RULE = """
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceCreationResult;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceReadInfo;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonScanBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

public class VirtaPlans extends scala.runtime.AbstractFunction1 {
  public Object apply(Object session) { return new SwapTables(); }

  public static class SwapTables extends Rule {
    public TreeNode apply(TreeNode plan) {
      return (TreeNode) ((LogicalPlan) plan).resolveOperatorsUp(new Swap());
    }
  }

  public static class Swap extends scala.runtime.AbstractPartialFunction {
    public boolean isDefinedAt(Object node) {
      if (!(node instanceof DataSourceV2Relation)) return false;
      DataSourceV2Relation relation = (DataSourceV2Relation) node;
      Table table = relation.table();
      return table.getClass() == PythonTable.class && "virta".equalsIgnoreCase(table.name());
    }

    public Object applyOrElse(Object node, scala.Function1 otherwise) {
      if (!isDefinedAt(node)) return otherwise.apply(node);
      DataSourceV2Relation old = (DataSourceV2Relation) node;
      Table table = new PlanningTable(old.table().name(), old.table().schema());
      return old.copy(table, old.output(), old.catalog(), old.identifier(), old.options(), old.timeTravelSpec());
    }
  }

  // The source object keeps the plan: one per scan.
  public static class PlanningTable extends PythonTable {
    private final PythonDataSourceV2 made;
    private final String shortName;
    private final StructType columns;

    public PlanningTable(String name, StructType schema) {
      this(new PythonDataSourceV2(), name, schema);
    }

    private PlanningTable(PythonDataSourceV2 source, String name, StructType schema) {
      super(source, name, schema);
      source.setShortName(name);
      made = source;
      shortName = name;
      columns = schema;
    }

    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      java.util.Map given = new java.util.HashMap(options.asCaseSensitiveMap());
      given.put("OWN_PLAN", "true");
      PythonDataSourceV2 source = new OnePlan(made);
      source.setShortName(shortName);
      return new PythonScanBuilder(source, shortName, columns, new CaseInsensitiveStringMap(given));
    }
  }

  // A plan with pushed conditions belongs to this scan; the one without any is shared.
  public static class OnePlan extends PythonDataSourceV2 {
    private final PythonDataSourceV2 made;
    private PythonDataSourceReadInfo own;

    public OnePlan(PythonDataSourceV2 source) { made = source; }

    public void setReadInfo(PythonDataSourceReadInfo plan) { own = plan; }

    public PythonDataSourceReadInfo getOrCreateReadInfo(
        String name, CaseInsensitiveStringMap options, StructType schema, boolean streaming) {
      if (own != null) return own;
      synchronized (made) { return made.getOrCreateReadInfo(name, options, schema, streaming); }
    }

    public PythonDataSourceCreationResult getOrCreateDataSourceInPython(
        String name, CaseInsensitiveStringMap options, scala.Option schema) {
      synchronized (made) { return made.getOrCreateDataSourceInPython(name, options, schema); }
    }
  }
}
"""


_ruled: WeakSet[SparkSession] = WeakSet()  # the sessions that have the rule


class PlanRuleError(VirtaError):
    """The rule has no effect in a session."""

    default_code = "plan_rule"


def plan_each_query(spark: SparkSession) -> None:
    """
    Add the rule to a session once, and check that it took effect.

    Where it did not (the session has analysed a query already, or Spark has other internals), switch push-down off and
    log a warning.
    """
    from py4j.protocol import (  # type: ignore[import-untyped]  # noqa: PLC0415 - part of an extra
        Py4JError,
    )
    from pyspark.errors import PySparkException  # noqa: PLC0415

    if spark in _ruled:
        return
    _ruled.add(spark)
    try:
        add_rule(spark)
    except (Py4JError, PySparkException, TypeError, VirtaError) as error:
        spark.conf.set(PUSHDOWN_SETTING, "false")
        reason = str(error).strip().splitlines()[0]
        logger.warning("conditions on a log are not pushed down by this Spark: %s", reason)


def add_rule(spark: SparkSession) -> None:
    # Any: these are objects of the JVM.
    jvm: Any = spark._jvm  # noqa: SLF001 - no Python API for extensions
    session: Any = spark._jsparkSession  # noqa: SLF001
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(RULE.replace("OWN_PLAN", OWN_PLAN))
    rule = compiler.getClassLoader().loadClass("VirtaPlans").newInstance()
    session.extensions().injectResolutionRule(rule)
    if "VirtaPlans" not in str(session.sessionState().analyzer().extendedResolutionRules()):
        raise PlanRuleError("the session has analysed a query already")
